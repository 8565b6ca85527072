"""The build of the buffer's functions that this client calls. Generated from services/replay/functions: run `make build`."""

BUILD = "327ec190"
