# Fuzzers, tests/fuzz/<name>.cpp: those that every run of the tests builds and runs, and those run by name only, because
# they take minutes to build (LLVM).
set(fuzz_targets regions ring fatbin image_cache client_image ptx_parser options ucx_messages client_replies handshake
  lease_rpc holder frames call_rows)
set(fuzz_by_name ptx_translate)
