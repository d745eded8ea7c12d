"""`eagle31 report`: records as one page to read, with plots. From records alone; no model is needed."""
