// The library is opened at run time, by programs that never heard of it: nothing in it may need to be there
// from the start (large thread-local arrays do).
#include <dlfcn.h>

#include "catch.h"

TEST_CASE("the driver can be opened at run time") {
  void* library = dlopen(SOFT_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  INFO((library ? "" : dlerror()));
  REQUIRE(library);
  auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
  REQUIRE(init);
  CHECK(init(0) == 0);
  CHECK(dlsym(library, "gpupoolSoftwareGpu") != nullptr);
}
