-- What the warehouse reads.
CREATE PIPELINE deliver WITH (partitions = 4);

INSERT INTO deliveries
SELECT id, customer, amount, amount >= 500 AS is_large FROM orders_by_customer
DISTRIBUTE BY customer;
