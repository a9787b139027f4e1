"""Publishing by epochs: the messages sent by all tasks of an epoch are published once, or not at all.

A computation in steps, each of which may be repeated after a failure, gives each link the *producer* it
belongs to, the *epoch* (step), the part of it, and the attempt at that part. The messages of such a link
are held in a :class:`~amqp_rt.broker.staging.stages.MessageStage`, where no consumer sees them. One request commits an epoch: it names the
attempts that count, with the number and the checksum of their messages, and these are published in that
order. Committing an epoch again does not publish it again.

The number of an epoch does not determine its content: a checkpoint that was restored from a backup
continues from an older number and plans other input under it. Therefore the producer keeps with its last
epoch an :class:`~amqp_rt.broker.durable.facts.Identity` of each *write* to it. An equal repetition is skipped; a different one is
refused with :data:`~amqp_rt.broker.staging.epochs.DIFFERENT`, since skipping it would lose messages, and publishing it would duplicate
some. An epoch may have several writes: each has a name of its own, and a later run repeats them in their
order.

A producer has *runs*. A new run replaces the one before it: links of the earlier run are detached with
``amqp:link:stolen``, and its commits are refused, so that a process believed dead cannot interfere.

In a store the decision to commit is one fact. Its effects are written in steps, each of which moves
messages from their stage to their node in one commit, and they continue after a restart: however large
an epoch is, publishing it takes bounded memory.
"""
