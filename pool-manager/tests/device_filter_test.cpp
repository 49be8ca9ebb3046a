#include "pool-manager/device_filter.h"

#include <stdexcept>

#include "catch.h"
#include "support.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

namespace {

Device device(const std::string& name, uint64_t memoryGiB, uint32_t major, uint32_t minor) {
  Device one;
  one.name = name;
  one.memoryBytes = memoryGiB << 30;
  one.computeMajor = major;
  one.computeMinor = minor;
  return one;
}

const Device kH200 = device("NVIDIA H200", 140, 9, 0), kA100 = device("NVIDIA A100-SXM4-40GB", 40, 8, 0),
             kL40 = device("NVIDIA L40S", 45, 8, 9);

bool fits(const std::string& text, const Device& device) { return parseDeviceFilter(text).matches(device); }

}  // namespace

TEST_CASE("a name is a part of the device's, whatever its case; one of several has to fit") {
  CHECK(fits("", kH200));
  CHECK(fits("h200", kH200));
  CHECK(fits("Nvidia h", kH200));
  CHECK_FALSE(fits("h200", kA100));
  CHECK(fits("h200, a100", kA100));
  CHECK_FALSE(fits("h200,a100", kL40));
}

TEST_CASE("conditions all have to hold") {
  CHECK(fits("memory>=40GiB", kA100));
  CHECK_FALSE(fits("memory>=41GiB", kA100));
  CHECK(fits("memory<=45GiB,compute>=8.9", kL40));
  CHECK_FALSE(fits("memory<=45GiB,compute>=8.9", kA100));
  CHECK(fits("compute>=9", kH200));
  CHECK_FALSE(fits("compute>=9.1", kH200));
  CHECK(fits("l40, compute >= 8.9, compute <= 8.9", kL40));
  CHECK_FALSE(fits("a100,memory>=80GiB", kA100));
}

TEST_CASE("what is no filter is refused in words") {
  const std::pair<const char*, const char*> wrong[] = {{"memory>80GiB", "a condition has >= or <="},
                                                       {"speed>=3", "no 'speed'"},
                                                       {"memory>=lots", "'lots'"},
                                                       {"h200,", "a name or a condition is missing"},
                                                       {"compute>=a.b", "'a' is not a whole number"}};
  for (const auto& [text, why] : wrong) {
    const std::string said = thrown([&, text = text] { parseDeviceFilter(text); });
    INFO(said);
    CHECK(contains(said, why));
    CHECK(contains(said, "examples: h200; memory>=80GiB"));
  }
  CHECK(contains(thrown([] { parseDeviceFilter(std::string(300, 'h')); }), "too long"));
}
