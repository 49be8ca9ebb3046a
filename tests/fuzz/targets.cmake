# Fuzzers, tests/fuzz/<name>.cpp: those that every run of the tests builds and runs, and those run by name only, because
# they take minutes to build (the worker's call rows, LLVM).
set(fuzz_targets regions ring fatbin image_cache client_image ptx_parser options)
set(fuzz_by_name frames call_rows ucx_messages ptx_translate)
