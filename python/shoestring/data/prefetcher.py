"""Read batches ahead of the training step, and copy them to its device."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from shoestring import _load

_load.load()

# How long a call waits in C++, in seconds, before Python can handle signals such as Ctrl-C.
_PATIENCE = 0.1


class _End(Exception):
    """Raised by a source that has no more batches."""


class _Batches:
    """The reader thread hands this to the consumer beside the tensors, which go through the ring."""

    def __init__(self) -> None:
        # For each batch: its structure, its leaves without the tensors, and the indices of the tensors.
        self.structures: dict[int, tuple[_pytree.TreeSpec, list[Any], list[int]]] = {}
        self.error: BaseException | None = None


def _holds_tensors(leaf: object) -> bool:
    """Return whether an object that is a leaf to _pytree has tensors as its items or attributes."""
    if isinstance(leaf, Mapping):
        values: Iterable[object] = leaf.values()
    elif isinstance(leaf, tuple | list):
        values = leaf
    else:
        values = getattr(leaf, "__dict__", {}).values()
    return any(isinstance(value, Tensor) for value in values)


def _put(ring: Any, batches: _Batches, number: int, batch: object) -> None:
    """Put the tensors of a batch into the ring, with a function that restores the structure around them."""
    leaves, structure = _pytree.tree_flatten(batch)
    tensors, indices = [], []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            indices.append(i)
            leaves[i] = None
        elif _holds_tensors(leaf):
            raise TypeError(
                "Prefetcher: source: expected tensors in tuples, lists, dicts or classes that torch.utils._pytree "
                f"knows, got {type(leaf).__name__} in batch {number}. Return dict(batch), or register the class."
            )
    batches.structures[number] = structure, leaves, indices
    ring.put(tensors)


def _read(ring: Any, source: Callable[..., Any], buffers: tuple[Any, ...], batches: _Batches) -> None:
    """Read batches until no more are wanted. This is the reader thread; it has no reference to its Prefetcher."""
    try:
        while (number := ring.claim()) is not None:
            try:
                batch = source(number, *buffers)
            except StopIteration as error:
                # Out of Prefetcher.__next__, StopIteration would end the consumer's loop without an error.
                raise RuntimeError(
                    f"Prefetcher: source: expected batch {number}, got StopIteration. Give the prefetcher a `stop`."
                ) from error
            _put(ring, batches, number, batch)
            del batch
    except _End:
        ring.finish()
    # The consumer raises every error of the source, SystemExit as well.
    except BaseException as error:
        batches.error = error
        ring.fail(str(error))


def _allocator(ring: Any) -> Callable[[Sequence[int], torch.dtype], Tensor]:
    """Return a function that makes tensors in the pinned memory of the batch that is being read."""

    def empty(size: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor: Tensor = ring.empty(list(size), dtype)
        return tensor

    return empty


def _close(ring: Any, reader: threading.Thread) -> None:
    ring.close()
    # The garbage collector may call this in the reader thread, and a signal handler before the reader has begun.
    if reader is not threading.current_thread() and reader.is_alive():
        reader.join()


def _numbered(batches: Iterator[Any], start: int) -> Callable[[int], Any]:
    """Return a source that skips ``start`` batches of an iterator at its first call."""
    skipped = 0

    def source(number: int) -> Any:
        nonlocal skipped
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                if skipped < start:
                    raise ValueError(
                        f"Prefetcher: start: expected at most {skipped}, the number of batches of the source, "
                        f"got {start}. Resume with the data of the first run."
                    ) from None
                raise _End from None
            if skipped == start:
                return batch
            skipped += 1

    return source


class Prefetcher(Iterator[Any]):
    """Iterate over batches that a thread reads one step ahead and copies to the device::

        batches = Prefetcher(lambda number: (inputs[number], labels[number]), "cuda", stop=1000)
        for x, y in batches:
            loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    Copies to the device come from pinned memory and run on a stream of their own, while the previous step
    computes. ``next`` waits on the host only if the batch has not been read yet; the current stream waits for
    the copy.

    A batch is a tensor, or tensors and other values in tuples, lists, dicts and classes that
    ``torch.utils._pytree`` knows. It comes back in the same structure: tensors on the device, with the same
    values, sizes, dtypes and, if they are dense, strides; all other values as they are.

    The tensors of a batch are valid until the following call of ``next``, which takes their memory back once
    the work that is in the current stream at that time has ended. Clone what must live longer. Work on other
    streams must have joined the current stream by then. Autograd raises if a later ``backward`` needs a tensor
    of an earlier batch. On the CPU nothing is copied: ``next`` returns the tensors of the source, which stay
    valid.

    Memory: ``depth`` times the largest batch, on the device and in pinned host memory. It grows if a batch is
    larger than all batches before it.

    The source runs on another thread, beginning with the first ``next``, and its operators use one thread. It
    should draw random numbers from a generator of its own. If it raises, ``next`` raises the same exception in
    place of that batch, and again at each later call. In a forked child, ``next`` raises RuntimeError.

    ``next`` must be called by one thread at a time: a call while another thread is in ``next`` raises
    RuntimeError. Any thread may call ``close``, which ends a ``next`` that waits in another thread with
    RuntimeError, ``state_dict`` and ``seconds_waited``.

    A source that writes its batch into pinned memory itself saves a copy on the host::

        def source(number, empty):
            x = empty((8, 512), torch.int64)  # a tensor like that of torch.empty
            x.numpy()[:] = tokens[number]  # tokens is a numpy.memmap of 16-bit integers
            return x

        batches = Prefetcher(source, "cuda", fills_buffers=True)

    Args:
        source: a callable that returns the batch of a number, or an iterable of batches, such as a DataLoader
            or a list. Tensors must be dense and on the CPU. A callable whose result depends on nothing but the
            number resumes at once; of an iterable, the batches before the position are read and dropped.
        device: the device of the tensors that ``next`` returns: "cpu", or an accelerator of PyTorch.
        depth: the number of batches that exist at a time: the batch in use, and ``depth - 1`` that are read
            ahead.
        start: the number of the first batch.
        stop: the number after that of the last batch. Defaults to all batches of an iterable, and to no end of
            a callable.
        fills_buffers: call ``source(number, empty)``. ``empty(size, dtype)`` returns an uninitialised,
            contiguous CPU tensor, which is valid until the source returns. The tensor is in pinned memory, or
            in ordinary memory if the device is the CPU or if the batch is larger than all batches before it.
        poison: for debugging, fill the device memory of a batch with 0xFF bytes (NaN, -1) when ``next`` takes
            it back, so that code which still reads the batch shows. Has nothing to fill on the CPU.

    Raises:
        TypeError: source is neither callable nor iterable, or not callable with ``fills_buffers``, or a batch has
            tensors in an unknown class.
        ValueError: an argument is out of range, a tensor is not dense or not on the CPU, or the source has
            fewer batches than ``start``.
        RuntimeError: ``next`` is called after ``close``, while another thread is in ``next``, or in a forked
            child, or the prefetcher is closed while ``next`` waits.

    Example:
        >>> from shoestring.data import Prefetcher
        >>> with Prefetcher([torch.zeros(2), torch.ones(2)], "cpu") as batches:
        ...     print([int(batch.sum()) for batch in batches], batches.state_dict())
        [0, 2] {'position': 2}

    Reference:
        The method is double buffering; https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
        explains pinned memory and copies that do not block.
    """

    def __init__(
        self,
        source: Callable[..., Any] | Iterable[Any],
        device: torch.device | str,
        *,
        depth: int = 2,
        start: int = 0,
        stop: int | None = None,
        fills_buffers: bool = False,
        poison: bool = False,
    ) -> None:
        # iter(source) would tell as well, but a DataLoader then draws a random number.
        if not callable(source) and not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
            raise TypeError(
                f"Prefetcher: source: expected a callable or an iterable, got {type(source).__name__}. "
                "Pass a function of the batch's number, or a DataLoader."
            )
        if fills_buffers and not callable(source):
            raise TypeError(
                f"Prefetcher: source: expected a callable with fills_buffers, got {type(source).__name__}. "
                "Pass a function of the batch's number and of `empty`."
            )
        self._source = source
        self._fills_buffers = fills_buffers
        self._consumer = threading.Lock()  # held in next and load_state_dict
        # Held to change the attributes below, never while waiting for the source. It is reentrant, because a
        # signal handler may call close at any place, also where the same thread holds the lock.
        self._lock = threading.RLock()
        self._arguments = torch.device(device), depth, stop, poison
        self._ring = self._new_ring(start)  # None once the prefetcher is closed
        self._start = start  # the position at which the ring began, or at which the prefetcher was closed
        self._seconds_waited = 0.0  # the time waited for earlier rings
        self._batches = _Batches()
        self._stop_reader: weakref.finalize[Any, Any] | None = None

    def _new_ring(self, start: int) -> Any:
        device, depth, stop, poison = self._arguments
        return torch.classes.shoestring.PrefetchRing(device, depth, start, stop, poison)

    def _start_reader(self, ring: Any) -> None:
        source = self._source if callable(self._source) else _numbered(iter(self._source), self._start)
        self._batches = _Batches()
        # A daemon, because Python waits for other threads before it calls finalizers at exit.
        buffers = (_allocator(ring),) if self._fills_buffers else ()
        arguments = ring, source, buffers, self._batches
        reader = threading.Thread(target=_read, args=arguments, name="Prefetcher", daemon=True)
        self._stop_reader = weakref.finalize(self, _close, ring, reader)
        reader.start()

    def __iter__(self) -> Prefetcher:
        return self

    def _open_ring(self) -> Any:
        ring = self._ring
        if ring is None:
            raise RuntimeError("Prefetcher: expected an open prefetcher, got a closed one. Create a new one.")
        return ring

    def _check_alone(self, method: str) -> None:
        """Raise if another thread is in next.

        The caller then takes ``_consumer`` in a ``with`` statement, which Ctrl-C cannot interrupt before its block.
        If two threads pass this check at once, one of them waits there.
        """
        if self._consumer.locked():
            raise RuntimeError(
                f"Prefetcher: {method}: expected one thread at a time, got a call while another thread waits for batch "
                f"{self.state_dict()['position']}. Call next from one thread, or hold a lock around next and the use of "
                "its batch."
            )

    def _reading(self) -> tuple[Any, _Batches]:
        """Return the ring and what the reader thread hands over. The reader starts at the first call."""
        with self._lock:
            ring = self._open_ring()
            if self._stop_reader is None:
                ring.wait(0.0)  # raises in a forked child
                self._start_reader(ring)
            return ring, self._batches

    def __next__(self) -> Any:
        self._check_alone("next")
        with self._consumer:
            ring, batches = self._reading()
            while not ring.wait(_PATIENCE):
                pass
            number = ring.position()
            try:
                tensors = ring.next()
            except RuntimeError:
                if batches.error is not None and self._ring is ring:
                    raise batches.error from None
                raise
            if tensors is None:
                raise StopIteration
            structure, leaves, indices = batches.structures.pop(number)
        for i, tensor in zip(indices, tensors, strict=True):
            leaves[i] = tensor
        return _pytree.tree_unflatten(leaves, structure)

    @property
    def seconds_waited(self) -> float:
        """The seconds that ``next`` has waited for the source.

        The time in which the host waits because the device is behind does not count.
        """
        with self._lock:
            ring = self._ring
            return self._seconds_waited + (0.0 if ring is None else float(ring.seconds_waited()))

    def state_dict(self) -> dict[str, int]:
        """Return the number of the batch that ``next`` returns next, as ``{"position": number}``."""
        with self._lock:
            ring = self._ring
            return {"position": self._start if ring is None else int(ring.position())}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue with the batch at the position of ``state``, which :meth:`state_dict` returned.

        Raises:
            RuntimeError: the prefetcher is closed, or another thread is in ``next``.
            ValueError: ``state`` has no position, the position is negative or behind ``stop``, or the source is
                an iterator from which batches have been read.
        """
        position = state.get("position")
        if not isinstance(position, int) or isinstance(position, bool):
            raise ValueError(
                f"Prefetcher: state: expected a dict with an int as 'position', got {dict(state)}. "
                "Pass the result of state_dict()."
            )
        self._check_alone("load_state_dict")
        with self._consumer:
            with self._lock:
                self._open_ring()
                if self._stop_reader is not None and isinstance(self._source, Iterator):
                    raise ValueError(
                        "Prefetcher: source: expected an iterable that can begin again, got an iterator that has "
                        "begun. Create a new prefetcher of a new iterator."
                    )
                stop_reader = self._replace_ring(self._new_ring(position), position)
            try:
                stop_reader()
            except BaseException:
                self.close()  # The source may not have returned, so no other reader may begin.
                raise

    def close(self) -> None:
        """Stop reading and free the buffers. Waits until the source has returned."""
        with self._lock:
            stop_reader = self._replace_ring(None, None)
        stop_reader()

    def _replace_ring(self, ring: Any, start: int | None) -> Callable[[], Any]:
        """Close the ring, and put another one or None in its place. Return a function that waits for the reader."""
        former, stop_reader, batches = self._ring, self._stop_reader, _Batches()
        if former is None:
            return lambda: None
        former.close()  # The position of a closed ring stays the same.
        position, waited = int(former.position()), float(former.seconds_waited())
        if self._ring is former:  # unless a signal handler has closed the prefetcher meanwhile
            self._start = position if start is None else start
            self._seconds_waited += waited
            self._ring, self._batches, self._stop_reader = ring, batches, None
        return stop_reader or (lambda: None)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
