// The driver seam, against driver libraries built for this test.
#include "server/driver.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "catch.h"

using gpupool::server::Driver;

namespace {

std::string failure(const std::string& path) {
  try {
    Driver::load(path);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("a driver's functions are typed members, null where the library lacks them") {
  auto driver = Driver::load(FAKE_DRIVER);
  CHECK(driver->path() == FAKE_DRIVER);
  CHECK_FALSE(driver->software());
  int count = 0;
  REQUIRE(driver->cuInit(0) == CUDA_SUCCESS);
  REQUIRE(driver->cuDeviceGetCount(&count) == CUDA_SUCCESS);
  CHECK(count == 2);
  CHECK(driver->cuMemAlloc_v2 == nullptr);
  static_assert(std::is_same_v<decltype(driver->cuMemAlloc_v2), CUresult (*)(CUdeviceptr*, size_t)>);
}

TEST_CASE("every name is found by text, no other is") {
  auto driver = Driver::load(FAKE_DRIVER);
  CHECK(driver->find("cuInit") == reinterpret_cast<void*>(driver->cuInit));
  CHECK(driver->find("cuLaunchKernel") == reinterpret_cast<void*>(driver->cuLaunchKernel));
  CHECK(driver->find("cuDeviceGetUuid_v2") == reinterpret_cast<void*>(driver->cuDeviceGetUuid_v2));
  CHECK(driver->find("cuArray3DCreate") == nullptr);
  CHECK(driver->find("cuInitialise") == nullptr);
  CHECK(driver->find("") == nullptr);
  CHECK(driver->find("zzz") == nullptr);
}

TEST_CASE("errors read like the driver's own") {
  auto driver = Driver::load(FAKE_DRIVER);
  CHECK(driver->describe(CUDA_ERROR_NO_DEVICE) ==
        "CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected");
  CHECK(driver->describe(static_cast<CUresult>(12345)) == "unknown CUDA error (12345)");
}

TEST_CASE("libraries that cannot serve are refused with the reason") {
  CHECK(contains(failure(FAKE_DRIVER_LACKING), "lacks cuLaunchKernel"));
  CHECK(contains(failure(FAKE_DRIVER_CLIENT), "gpupool's own client library"));
  CHECK(contains(failure("/nonexistent/libcuda.so.1"), "/nonexistent/libcuda.so.1"));
}

TEST_CASE("the environment names the driver where the caller does not") {
  setenv("GPUPOOL_DRIVER", FAKE_DRIVER, 1);
  CHECK(Driver::load()->path() == FAKE_DRIVER);
  CHECK(contains(failure(FAKE_DRIVER_LACKING), "lacks"));
  unsetenv("GPUPOOL_DRIVER");
}
