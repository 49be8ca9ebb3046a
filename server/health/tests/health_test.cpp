// What NVML says, and a thread that hears it, from a library that the test commands (fake_nvml.cpp).
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <thread>

#include "catch.h"
#include "server/health/watch.h"
#include "server/health/xid.h"

using namespace gpupool;
using namespace gpupool::health;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

namespace {

// The loader knows a library that is loaded by its inode: none is given to another one meanwhile.
struct Folders {
  ~Folders() {
    for (const std::string& folder : all) std::filesystem::remove_all(folder);
  }
  std::vector<std::string> all;
} folders;

// Each has a copy of the library of its own, and so state of its own.
struct Library {
  Library() {
    char name[] = "/tmp/gpupool-health-XXXXXX";
    folder = folders.all.emplace_back(mkdtemp(name));
    std::filesystem::copy_file(FAKE_NVML, path());
    setenv("FAKE_NVML_STATE", state().c_str(), 1);
  }
  std::string path() const { return folder + "/libnvidia-ml.so.1"; }
  std::string state() const { return folder + "/state"; }
  // Whole or not at all, as it is read at any moment.
  void says(const std::string& text) const {
    std::ofstream(state() + ".new") << text;
    std::filesystem::rename(state() + ".new", state());
  }
  std::string folder;
};

const std::vector<std::string> kTwo = {"GPU-00000000-0000-0000-0000-000000000001",
                                       "GPU-00000000-0000-0000-0000-000000000002"};

bool until(const std::function<bool()>& condition) {
  for (const auto end = Clock::now() + 30s; Clock::now() < end; std::this_thread::sleep_for(2ms))
    if (condition()) return true;
  return false;
}

}  // namespace

TEST_CASE("a sample has what NVML says, and defaults for what it does not") {
  Library library;
  std::string why;
  auto gpus = loadNvml(library.path(), {kTwo[0], "GPU-ff000000-0000-0000-0000-000000000000"}, &why);
  REQUIRE(gpus != nullptr);
  CHECK(gpus->count() == 2);
  bool lost = false;
  CHECK(gpus->sample(0, &lost) == DeviceSample{});
  library.says("load 37 memory 1024 temperature 41 power 300500 limit 700000 sm 1980 mem 3201 ecc 2 links 3");
  const DeviceSample sample = gpus->sample(0, &lost);
  CHECK(sample.gpuPercent == 37);
  CHECK(sample.memoryPercent == 5);
  CHECK(sample.usedBytes == 1024);
  CHECK(sample.totalBytes == 4096);
  CHECK(sample.temperatureC == 41);
  CHECK(sample.powerMw == 300500);
  CHECK(sample.powerLimitMw == 700000);
  CHECK(sample.smMhz == 1980);
  CHECK(sample.memoryMhz == 3201);
  CHECK(sample.eccErrors == 2);
  CHECK(sample.nvlinks == 3);
  CHECK(gpus->sample(1, &lost) == DeviceSample{});  // NVML does not know it
  CHECK(!lost);
  library.says("load 1 lost 1");
  gpus->sample(0, &lost);
  CHECK(lost);
}

TEST_CASE("figures have NVML's own answers, and are taken once, and then only while somebody wants them") {
  Library library;
  library.says("load 37 memory 1024 temperature 41 sm 1980 links 3");
  auto watch = watchGpus(library.path(), "", kTwo, {.period = 20ms, .wanted = 60s, .figurePause = 1ms});
  REQUIRE(until([&] { return watch->figures().devices.size() == 2; }));
  const Figures first = watch->figures();
  const schema::NvmlFigures& one = first.devices[0];
  CHECK((one.utilization.status == NVML_SUCCESS && one.utilization.value.gpu == 37));
  CHECK(
      (one.memory.status == NVML_SUCCESS && one.memory.value.used == 1024 && one.memory.value.total == 4096));
  CHECK((one.temperatures[0].status == NVML_SUCCESS && one.temperatures[0].value == 41));
  CHECK((one.clocks[NVML_CLOCK_SM].status == NVML_SUCCESS && one.clocks[NVML_CLOCK_SM].value == 1980));
  CHECK(one.clocks[NVML_CLOCK_MEM].status == NVML_ERROR_NOT_SUPPORTED);
  CHECK(
      (one.linkStates[2].value == NVML_FEATURE_ENABLED && one.linkStates[3].value == NVML_FEATURE_DISABLED));
  CHECK(one.powerMw.status == NVML_ERROR_NOT_SUPPORTED);
  CHECK(one.name.status == NVML_ERROR_NOT_SUPPORTED);  // the library has no such function
  CHECK((first.between.size() == 2 && first.between[0].size() == 2));
  CHECK(first.between[0][1].ancestor.status == NVML_ERROR_NOT_SUPPORTED);
  library.says("load 38 memory 1024 lost 1");
  REQUIRE(until([&] { return watch->latest().samples[1].gpuPercent == 38; }));  // its thread has gone on
  CHECK(watch->figures().devices[1].utilization.value.gpu == 37);
  watch->want();
  REQUIRE(until([&] { return watch->figures().devices[0].utilization.status == NVML_ERROR_GPU_IS_LOST; }));
  CHECK(watch->figures().devices[1].utilization.value.gpu == 38);
}

TEST_CASE("the watch says which GPUs NVLink joins, and follows it") {
  Library library;
  const std::vector<std::string> four = {kTwo[0], kTwo[1], "GPU-00000000-0000-0000-0000-000000000003",
                                         "GPU-ff000000-0000-0000-0000-000000000000"};
  auto watch = watchGpus(library.path(), "", four, {.period = 10ms, .linkPeriod = 1ms});
  REQUIRE(until([&] { return watch->nvlinks() == std::vector<uint64_t>(4); }));  // no such question is known
  library.says("joined 2");
  REQUIRE(until([&] { return watch->nvlinks() == std::vector<uint64_t>{0b10, 0b01, 0, 0}; }));
  library.says("joined 4");  // but NVML does not know the last one
  REQUIRE(until([&] { return watch->nvlinks() == std::vector<uint64_t>{0b110, 0b101, 0b011, 0}; }));
  library.says("joined 1");
  REQUIRE(until([&] { return watch->nvlinks() == std::vector<uint64_t>(4); }));
  CHECK(watchGpus("none", "", four)->nvlinks().empty());
}

TEST_CASE("a library that cannot serve is refused with the reason") {
  Library library;
  std::string why;
  CHECK(loadNvml(library.folder + "/none.so", kTwo, &why) == nullptr);
  CHECK(why.find("none.so") != std::string::npos);
  CHECK(loadNvml("libc.so.6", kTwo, &why) == nullptr);
  CHECK(why == "libc.so.6 is no NVML");
  library.says("init 1");
  CHECK(loadNvml(library.path(), kTwo, &why) == nullptr);
  CHECK(why == library.path() + ": Driver Not Loaded");
  const Report report = watchGpus(library.path(), "", kTwo)->latest();
  CHECK(report.note == "no NVML: " + why);
  CHECK(report.samples.empty());
  CHECK(watchGpus("none", "", kTwo)->latest().note == "not asked (--nvml none)");
}

TEST_CASE("the library beside the driver is taken") {
  Library library;
  CHECK(nvmlBeside(library.folder + "/libcuda.so.1") == library.path());
  CHECK(nvmlBeside("/nonexistent/libcuda.so.1") == "libnvidia-ml.so.1");
  CHECK(nvmlBeside("libcuda.so.1") == "libnvidia-ml.so.1");
}

TEST_CASE("samples follow what happens, and an Xid that no program causes breaks its GPU") {
  Library library;
  library.says("load 10");
  auto watch = watchGpus(library.path(), "", kTwo, {.period = 20ms});
  REQUIRE(until([&] { return watch->latest().samples.size() == 2; }));
  CHECK(watch->latest().samples[1].gpuPercent == 10);
  CHECK(watch->latest().note.empty());
  library.says("load 90 xid 31");
  REQUIRE(until([&] { return watch->latest().samples[1].xid == 31; }));
  CHECK(watch->latest().samples[1].gpuPercent == 90);
  CHECK(watch->latest().broken == std::vector<std::string>{"", ""});
  library.says("load 90 xid 31 xid 79 xid 43");
  REQUIRE(until([&] { return watch->latest().samples[1].xid == 43; }));
  CHECK(watch->latest().samples[0].xid == 0);
  CHECK(watch->latest().broken == std::vector<std::string>{"", "Xid 79: the GPU has fallen off the bus"});
  library.says("lost 1");
  REQUIRE(until([&] { return !watch->latest().broken[0].empty(); }));
  CHECK(watch->latest().broken[0] == "NVML: the GPU is lost");
}

TEST_CASE("a driver that does not answer holds up nobody, and its last samples expire") {
  Library library;
  library.says("load 10");
  auto watch = watchGpus(library.path(), "", kTwo, {.period = 10ms, .longest = 200ms, .stopBound = 50ms});
  REQUIRE(until([&] { return watch->latest().samples.size() == 2; }));
  library.says("stuck 1");
  REQUIRE(until([&] { return watch->latest().samples.empty(); }));
  CHECK(watch->latest().note == "NVML does not answer");
  const auto began = Clock::now();
  watch = nullptr;
  CHECK(Clock::now() - began < 20s);
  library.says("load 1");  // lets the abandoned thread end before its library's state goes
  std::this_thread::sleep_for(50ms);
}

TEST_CASE("errors of programs break no GPU") {
  for (const uint64_t xid : {0, 13, 31, 43, 45, 63, 68, 94, 999}) CHECK(fatalXid(xid) == nullptr);
  for (const uint64_t xid : {48, 62, 64, 79, 95, 119, 120}) CHECK(fatalXid(xid) != nullptr);
}
