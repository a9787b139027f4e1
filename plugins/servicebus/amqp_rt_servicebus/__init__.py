"""A namespace of Azure Service Bus and Event Hubs in the test process, for Microsoft's SDKs."""
