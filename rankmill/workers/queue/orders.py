"""Takes operators' orders to this worker: to drain or resume it, or to load or unload a model.

The heartbeat reads the orders, and the main thread carries them out.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from rankmill.jobs.contract.errors import SpecError, WireError
from rankmill.jobs.contract.shown import counted
from rankmill.jobs.contract.spec import ScoreSpec, weights_key
from rankmill.jobs.protocol.orders import Answer, Order
from rankmill.jobs.system import system
from rankmill.workers.backends.base import DeviceLost
from rankmill.workers.engine.cache import EngineCache
from rankmill.workers.host import metrics
from rankmill.workers.queue.claim_order import Refusals
from rankmill.workers.queue.claims import Claims

MAX_ANSWERS = 16
"""A worker's report has at most this many answers to operators' orders; the oldest are dropped."""

_MAX_TEXT = 500

logger = logging.getLogger(__name__)


class Orders:
    """Drains and resumes this worker, and loads and unloads its models, as operators order.

    Parameters
    ----------
    started
        Start of this process in seconds since 1970; orders to another process are ignored.
    engines
        The process's loaded models.
    spec
        Returns the score spec with which a model is loaded.
    claims
        The jobs that the worker has claimed; a drained worker claims no more.
    refusals
        The models and runs that the worker refuses now; a model that an order loads is removed from these.
    """

    def __init__(
        self,
        started: float,
        engines: EngineCache,
        spec: Callable[[str], ScoreSpec],
        claims: Claims,
        refusals: Refusals,
    ) -> None:
        self._started = started
        self._engines = engines
        self._spec = spec
        self._claims = claims
        self._refusals = refusals
        self._lock = system.RLock()
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._new: deque[Order] = deque()
        self._drains: list[str] = []
        self.news = system.Event()
        """Makes the heartbeat thread send the next heartbeat at once, for example with the answer to an
        order.
        """
        self.known: Sequence[bytes] = ()
        """The operators' orders that the last heartbeat read. The next heartbeat deletes them from Redis."""
        self.drained = False
        self.cold: dict[str, str] = {}
        """The models of the setting ``warm`` that are not loaded yet, each with the error if loading has
        failed.

        Replace this dict instead of changing it, because other threads read it.
        """
        self._pauses = Refusals()
        metrics.drained.set_function(lambda: self.drained)

    def deliver(self, raw_orders: Sequence[bytes]) -> None:
        self.known = raw_orders
        for raw in raw_orders:
            try:
                order = Order.read_json(raw, "an order to this worker")
            except WireError as error:
                logger.warning("%s", error)
                continue
            if order.started != self._started:
                logger.info("ignored an order to the process before this one: %s", order.what)
            elif order.id not in self._answers:
                self._answer(order.id, "begun", "waiting for its turn")
                self._new.append(order)

    def answers(self) -> tuple[Answer, ...]:
        with self._lock:
            held = len(self._claims.unanswered)
            for drain in self._drains:
                if held:
                    self._answer(drain, "begun", f"still draining: {counted(held, 'chunk')}")
                else:
                    self._answer(drain, "done", "drained")
            if not held:
                self._drains.clear()
            return tuple(self._answers.values())

    def carry_out(self) -> None:
        """Carry out the operators' orders that have arrived. Only the thread that uses the engines may call
        this. Raises `DeviceLost`.
        """
        while self._new:
            order = self._new.popleft()
            logger.info("order: %s%s", order.what, f" {order.model}" if order.model else "")
            try:
                self._carry_out(order)
            except SpecError as error:
                self._answer(order.id, "failed", str(error))
            except DeviceLost:
                raise
            except Exception as error:  # whatever is wrong with a model, an order must not end the worker
                logger.exception("cannot %s", order.what)
                self._answer(order.id, "failed", f"{type(error).__name__}: {error}")
            self.news.set()
        if self._drains and not self._claims.unanswered:
            self.news.set()

    def warm(self, models: Iterable[str]) -> None:
        """Load `models` before chunks need them. The worker serves other models even if one cannot be loaded.

        Raises `DeviceLost`.
        """
        self.cold = dict.fromkeys(models, "")
        self.warm_again()

    def warm_again(self) -> None:
        """Try to load the models of `cold` again, each after a pause that grows with each failure.

        Raises `DeviceLost`.
        """
        for model in [model for model in self.cold if not self._pauses.why(model)]:
            began = system.monotonic()
            try:
                self._engines.warm(self._spec(model))
            except SpecError as error:
                self.cold = {**self.cold, model: f"cannot warm up: {error}"}
                if self._pauses.open(model, str(error), took=system.monotonic() - began):
                    logger.error(
                        "%s; the worker is not ready until it can, and tries again", self.cold[model]
                    )
            else:
                reason = self.cold[model]
                self.cold = {name: why for name, why in self.cold.items() if name != model}
                if reason:
                    logger.info("has warmed up %s after all", model)

    def _carry_out(self, order: Order) -> None:
        if order.what == "drain":
            self.drained = True
            with self._lock:
                self._drains.append(order.id)
            self._claims.hand_back_unstarted()
        elif order.what == "resume":
            self._resume(order)
        elif order.model is None:
            self._answer(order.id, "failed", f"the order to {order.what} names no model")
        elif order.what == "warm":
            self._load(order.id, order.model, order.revision)
        else:
            self._unload(order.id, order.model)

    def _resume(self, order: Order) -> None:
        with self._lock:
            for drain in self._drains:
                self._answer(drain, "failed", "resumed before it was drained")
            self._drains.clear()
            text = "takes chunks again" if self.drained else "was not drained"
            self.drained = False
            self._answer(order.id, "done", text)

    def _load(self, order: str, model: str, revision: str | None) -> None:
        began, before = system.monotonic(), self._engines.models
        self._answer(order, "begun", "loading")
        self.news.set()
        spec = self._spec(model)
        spec = spec.model_copy(update={"revision": revision or spec.revision})
        self._engines.warm(spec)
        self._refusals.close(weights_key(spec))
        seconds = system.monotonic() - began
        gone = [name for name in dict.fromkeys(before) if name not in self._engines.models]
        text = f"has {model}, as before" if model in before else f"has loaded {model} in {seconds:.1f} s"
        if gone:  # the next chunk for one of these models will unload the new model again
            limits = "model_cache_size, model_cache_gib"
            text += f"; unloaded {', '.join(gone)} to make room ({limits}): they take turns"
        self._answer(order, "done", text)

    def _unload(self, order: str, model: str) -> None:
        held = len(self._claims.unanswered)
        if held and model in self._engines.models:
            self._answer(order, "begun", f"waiting for {counted(held, 'chunk')} that the worker has claimed")
            self.news.set()
        gone = self._engines.unload(model)
        self._answer(order, "done", f"has unloaded {model}" if gone else f"had not loaded {model}")

    def _answer(self, order: str, state: str, text: str) -> None:
        line = " ".join(text.split())[:_MAX_TEXT]
        answer = Answer.model_validate({"order": order, "state": state, "text": line})
        with self._lock:
            self._answers[order] = answer
            while len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        if state == "failed":
            logger.warning("order failed: %s", line)
