// An exception leaves frames without their epilogues, so AddressSanitizer has to forget what it knew of them.
// Its compiler sees to that where it sees the throw; KJ, Cap'n Proto and yaml-cpp were not made by it. So
// every throw of a fuzzer comes here first (linker: --wrap).
#include <typeinfo>

extern "C" {

void __asan_handle_no_return();
[[noreturn]] void __real___cxa_throw(void* thrown, std::type_info* type, void (*destroy)(void*));
[[noreturn]] void __real___cxa_rethrow();

[[noreturn]] void __wrap___cxa_throw(void* thrown, std::type_info* type, void (*destroy)(void*)) {
  __asan_handle_no_return();
  __real___cxa_throw(thrown, type, destroy);
}

[[noreturn]] void __wrap___cxa_rethrow() {
  __asan_handle_no_return();
  __real___cxa_rethrow();
}

}  // extern "C"
