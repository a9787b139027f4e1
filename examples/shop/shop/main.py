"""Nodes of the shop: ``amqp-rt run shop.main:container --url amqp://127.0.0.1:5672``."""

from __future__ import annotations

import os

from pydantic import BaseModel, Field
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from amqp_rt import Container, Reject, Retry, node, rpc
from amqp_rt.outbox import SqlInbox, SqlOutbox

from .bank import Bank, CardDeclined

#: Cents for one piece.
PRICES = {"A-1": 499, "B-2": 1250}

# SQLite gives other writers half a minute.
engine = create_engine(os.environ.get("SHOP_DATABASE", "sqlite:///shop.db?timeout=30"))
sessions = sessionmaker(engine)


# --- rows ---


class Base(DeclarativeBase):
    """Base of the tables."""


class OrderRow(Base):
    """Order in the database."""

    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]


# Tables of their own in the same database, so that one commit covers rows and messages.
outbox = SqlOutbox(sessions, metadata=Base.metadata)
inbox = SqlInbox(sessions, metadata=Base.metadata)


# --- messages ---


class Order(BaseModel):
    """Order as customers send it."""

    number: int
    sku: str
    quantity: int = Field(gt=0, le=100)
    card: str


class Invoice(BaseModel):
    """Amount to pay for an order."""

    number: int
    cents: int
    card: str


class Status(BaseModel):
    """State of an order: placed, paid or unpaid."""

    number: int
    state: str


# --- nodes ---


@node("orders", inbox=inbox, thread=True)
def place(order: Order, session: Session) -> None:
    """Write an order down, and send its invoice."""
    if order.sku not in PRICES:
        raise Reject(f"there is no {order.sku}")
    session.add(OrderRow(number=order.number, state="placed"))
    cents = order.quantity * PRICES[order.sku]
    # Sent after the commit, or never.
    outbox.send(session, "invoices", Invoice(number=order.number, cents=cents, card=order.card))


@node(
    "invoices",
    inbox=inbox,
    thread=True,
    retry=Retry(5, first_s=0.2, most_s=5, never=(CardDeclined,)),
)
def bill(invoice: Invoice, session: Session, bank: Bank) -> None:
    """Charge the card. While the bank does not answer, the invoice waits in its queue."""
    # The bank is not part of the transaction: it recognizes a second attempt by the number.
    bank.charge(invoice.card, invoice.cents, reference=str(invoice.number))
    session.get_one(OrderRow, invoice.number).state = "paid"


@rpc("orders/status", thread=True)
def status(number: int) -> Status:
    """State of an order."""
    with sessions() as session:
        order = session.get(OrderRow, number)
        return Status(number=number, state="unknown" if order is None else order.state)


container = Container(
    "shop", nodes=[place, bill, status], resources=[Bank()], outbox=outbox, drain_s=30
)


@container.on_startup
def create_tables() -> None:
    """Create the tables; a larger application uses Alembic."""
    Base.metadata.create_all(engine)
