"""What TensorBoard's event files hold."""

import struct


def events(folder):
    """The events of all files in a folder, and in those that it holds."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.rglob("events.*")):
        yield from map(Event.FromString, _records(path))


def scalars(folder):
    """name -> {step: value}"""
    curves = {}
    for event in events(folder):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                curves.setdefault(value.tag, {})[event.step] = value.simple_value
    return curves


def _records(path):
    """Each is its length, a checksum of that, its data, and their checksum."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + length]
        at += 16 + length
