-- The orders of a customer come together.
CREATE PIPELINE regroup WITH (partitions = 4);

INSERT INTO orders_by_customer
SELECT id, customer, amount FROM clean_orders
DISTRIBUTE BY customer;
