"""Make a trained model small enough for a budget, from the model, some texts and a limit (`hf_freeze.compress`)."""
