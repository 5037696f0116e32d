"""What a mapper keeps of a model's answers, measured through the library: `ridgefill mapper evaluate`.

Texts, items, records and statistics are those of ridgefill.evaluation. Here are the ways to fill a target's cache from another
model's (`engine`), the mappers that know nothing (`nulls`), what is asked besides (`choices`, `harness`, `turns`), the study that
runs it all (`study`), its figures (`report`) and the page that shows them (`page`, `plots`).
"""
