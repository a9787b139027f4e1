"""Invariants of an engine, which hold after any input of its peer."""

from __future__ import annotations

from amqp_rt.core.engine import Engine
from amqp_rt.core.lifecycle import Stage
from amqp_rt.core.receivers import ReceiverLink
from amqp_rt.core.senders import SenderLink


def check(engine: Engine) -> None:
    """Assert the invariants of *engine*."""
    limits = engine.limits
    assert engine.output_size >= 0
    if engine.finished:
        assert not engine.sessions
        assert not engine._remote
        assert engine.held == 0
        return
    assert len(engine.sessions) <= limits.channel_max + 1
    assert engine._buffer.held() <= max(limits.frame_size_max, limits.frame_size_before_open) + (
        limits.login_ahead_max
    )
    held = 0
    assembling = 0
    for channel, session in engine.sessions.items():
        assert session.channel == channel
        if session.remote_channel >= 0 and session.theirs.stage is Stage.MAPPED:
            assert engine._remote[session.remote_channel] is session
        handles = set(session.links)
        free = set(session._free_handles)
        assert len(free) == len(session._free_handles)
        assert handles | free == set(range(len(handles) + len(free)))
        assert not handles & free
        assert len(session._remote) <= limits.handle_max + 1
        assert len(session._unanswered) <= limits.handle_max + 1
        assert session.incoming_window >= 0
        assert session._held >= 0
        held += session._held
        for handle, link in session.links.items():
            assert link.handle == handle
            assert not link.ended
        for handle, link in session._remote.items():
            assert link.remote_handle == handle
            assert link.theirs.stage is Stage.ATTACHED
        for (name, role), link in session._names.items():
            assert (link.name, link.role) == (name, role)
        for link in session._unanswered:
            assert link.ours.stage is Stage.DETACHED
        for sending in session._outgoing.values():
            assert not sending.settled
        for delivery_id, delivery in session.incoming.items():
            assert delivery.delivery_id == delivery_id
            assert not delivery.local_settled
        for link in {*session.links.values(), *session._remote.values()}:
            assert 0 <= link.credit <= 0xFFFFFFFF
            assert 0 <= link.delivery_count <= 0xFFFFFFFF
            assert link.attached == (
                link.ours.stage is Stage.ATTACHED
                and link.theirs.stage is Stage.ATTACHED
                and not link.refused
            )
            if isinstance(link, ReceiverLink):
                assert link._excess >= 0
                current = link._current
                if current is not None and not link.streaming and not current.streamed:
                    assembling += current._unread
            elif isinstance(link, SenderLink):
                unsent = {id(q.sending) for q in link._queue if q.sending.delivery_id < 0}
                assert link._unsent == len(unsent)
                assert 0 <= link._uncredited <= link._unsent
                assert link._uncredited == 0 or link.credit == 0
    assert engine.held == held
    assert engine.assembling == assembling


def check_quiet(*engines: Engine) -> None:
    """Assert that *engines*, the two ends of a connection on which nothing is in flight, wait for nothing that is there."""
    for engine in engines:
        if engine.finished or engine.over:
            return
        assert not engine.output
        assert not engine._queued
        assert not engine._dirty
        for link in engine._waiting:
            session = link.session
            room = session.remote_incoming_window > 0 and (
                len(session._outgoing) < engine.limits.unsettled_max
            )
            assert link._queue or not room or not link.attached, (
                "a link waits for room that is there"
            )
    for engine, other in (engines, engines[::-1]):
        for session in engine.sessions.values():
            theirs = other._remote.get(session.channel)
            if theirs is None or session.remote_channel < 0 or session.ended or theirs.ended:
                continue
            assert session.remote_incoming_window >= theirs.incoming_window
            if theirs.incoming_window == 0:
                # Some of what came has to be read or settled first.
                assert theirs._held or len(theirs.incoming) >= other.limits.unsettled_max
            for link in session.links.values():
                if isinstance(link, SenderLink) and link._queue:
                    taken_back = link._unsent <= link._uncredited
                    begun = link._queue[0].sending.delivery_id >= 0
                    assert theirs.incoming_window == 0 or (taken_back and not begun), (
                        "frames wait for a window that is open"
                    )
