"""Media types that schemathesis does not know: how bodies of them are made, and that answers of them are bytes.

Nothing here leaves an operation, a check or a case out.
"""

import io
import tarfile

import schemathesis
from hypothesis import strategies as st

NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_.", min_size=1, max_size=12).filter(
    lambda name: name.strip(".")
)


@st.composite
def archives(draw):
    """Tar streams of a few small files and folders."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name in draw(st.lists(NAMES, max_size=4, unique=True)):
            entry = tarfile.TarInfo(name)
            if draw(st.booleans()):
                entry.type = tarfile.DIRTYPE
                entry.mode = 0o755
                archive.addfile(entry)
            else:
                content = draw(st.binary(max_size=64))
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return whole.getvalue()


schemathesis.openapi.media_type("application/x-tar", archives())


@schemathesis.serializer("application/x-tar")
def send_archive(_, value):
    """A generated archive as it is; anything else, which is meant to be refused, as what it is."""
    data = getattr(value, "data", value)
    return data if isinstance(data, bytes) else str(data).encode()


@schemathesis.deserializer("application/octet-stream", "application/x-tar")
def bytes_are_text_of_any_kind(_, response):
    """The document says of them that they are a string of bytes."""
    return response.content.decode("latin-1")
