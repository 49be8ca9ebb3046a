// perf-cases: runs the cases that perf/measure asks for on whichever libcuda.so.1 the loader finds, and
// prints one JSON object a line. perf/measure runs it natively and through the pool and compares.
//
//   perf-cases cases [--list] [--only a,b] [--largest BYTES] [--quick] [--budget-ms N] [--count]
//   perf-cases probe      the device's name and the driver's version
//   perf-cases start      from main to the first kernel done
//   perf-cases module N   loads a module that N makes unique, launches its kernel
//   perf-cases memory     resident memory before and after the first kernel; then waits for the end of its
//   input
//
// --count: one sample of each, between cuProfilerStart and cuProfilerStop, where gpupool's client
// (GPUPOOL_STATS=1) counts what it sends; a line on stderr after the counts says whose they are.

#include <fnmatch.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>

#include "perf/cases.h"
#include "perf/driver.h"

namespace gpupool::perf {
namespace {

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC, which perf/measure reads too
constexpr size_t kSamplesAtMost = 400, kSamplesAtLeast = 3;

int64_t nanoseconds(Clock::duration time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

struct Options {
  bool list = false, quick = false, count = false;
  std::set<std::string> only;
  size_t largest = size_t{1} << 30;
  std::chrono::milliseconds budget{120};
};

Options readOptions(int count, char** words) {
  Options options;
  for (int i = 0; i < count; ++i) {
    const std::string word = words[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= count) throw std::runtime_error(word + " needs a value");
      return words[++i];
    };
    if (word == "--list")
      options.list = true;
    else if (word == "--quick")
      options.quick = true;
    else if (word == "--count")
      options.count = true;
    else if (word == "--largest")
      options.largest = std::stoull(value());
    else if (word == "--budget-ms")
      options.budget = std::chrono::milliseconds(std::stoi(value()));
    else if (word == "--only") {
      std::istringstream names(value());
      for (std::string name; std::getline(names, name, ',');) options.only.insert(name);
    } else {
      throw std::runtime_error("unknown option " + word);
    }
  }
  return options;
}

std::vector<Case> allCases(const Options& options) {
  std::vector<Case> cases;
  addAllocationCases(cases, options.largest);  // first, so that "first" is true
  addLaunchCases(cases);
  addEventCases(cases);
  addGraphCases(cases);
  addCopyCases(cases, options.largest, options.quick);
  addLibraryCases(cases);
  addLastCases(cases);
  if (!options.only.empty())
    std::erase_if(cases, [&](const Case& item) {
      return std::none_of(options.only.begin(), options.only.end(), [&](const std::string& pattern) {
        return fnmatch(pattern.c_str(), item.name.c_str(), 0) == 0;
      });
    });
  return cases;
}

void call(const std::function<void()>& step) {
  if (step) step();
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= ' ') out += c;
  }
  return out + "\"";
}

double sample(const Case& item, const Steps& steps) {
  call(steps.before);
  const auto from = Clock::now();
  for (unsigned i = 0; i < item.operations; ++i) steps.body();
  auto to = Clock::now();
  call(steps.after);
  if (item.timesAfter) to = Clock::now();
  return static_cast<double>(nanoseconds(to - from)) / item.operations;
}

void time(const Case& item, Gpu& gpu, const Options& options) {
  const Steps steps = item.make(gpu);
  std::vector<double> samples;
  if (!item.once) sample(item, steps);
  const auto until = Clock::now() + options.budget;
  do {
    samples.push_back(sample(item, steps));
  } while (!item.once && samples.size() < kSamplesAtMost &&
           (samples.size() < kSamplesAtLeast || Clock::now() < until));
  std::sort(samples.begin(), samples.end());
  const size_t n = samples.size();
  std::printf("{\"case\":%s,\"ns\":%.1f,\"least\":%.1f,\"most\":%.1f,\"samples\":%zu,\"bytes\":%llu}\n",
              quoted(item.name).c_str(), (samples[n / 2] + samples[(n - 1) / 2]) / 2, samples[0],
              samples[n - 1], n, static_cast<unsigned long long>(item.bytes));
}

void count(const Case& item, Gpu& gpu) {
  const Steps steps = item.make(gpu);
  if (!item.once) sample(item, steps);  // code and buffers are there: what is counted is a repeat
  call(steps.before);
  ok(cuda().cuProfilerStart());
  for (unsigned i = 0; i < item.operations; ++i) steps.body();
  ok(cuda().cuProfilerStop());
  std::fprintf(stderr, "counted %s %u\n", item.name.c_str(), item.operations);
  call(steps.after);
}

int runCases(const Options& options) {
  const std::vector<Case> cases = allCases(options);
  if (options.list) {
    for (const Case& item : cases) std::printf("%s\n", item.name.c_str());
    return 0;
  }
  Gpu gpu(options.largest);
  gpu.launchEmpty();
  gpu.launchSixteen();
  gpu.synchronize();
  for (const Case& item : cases) {
    try {
      options.count ? count(item, gpu) : time(item, gpu, options);
    } catch (const std::exception& error) {
      std::printf("{\"case\":%s,\"error\":%s}\n", quoted(item.name).c_str(), quoted(error.what()).c_str());
    }
    std::fflush(stdout);
  }
  return 0;
}

int probe() {
  ok(cuda().cuInit(0));
  int version = 0;
  char name[256] = "";
  CUdevice device = 0;
  ok(cuda().cuDriverGetVersion(&version));
  ok(cuda().cuDeviceGet(&device, 0));
  ok(cuda().cuDeviceGetName(name, sizeof name, device));
  std::printf("{\"gpu\":%s,\"driver\":%d}\n", quoted(name).c_str(), version);
  return 0;
}

int start(Clock::time_point main) {
  Gpu gpu(0);
  gpu.launchEmpty();
  gpu.synchronize();
  std::printf("{\"main\":%lld,\"kernel\":%lld}\n",
              static_cast<long long>(nanoseconds(main.time_since_epoch())),
              static_cast<long long>(nanoseconds(Clock::now().time_since_epoch())));
  return 0;
}

// Replaces the module's marker, in machine code as four bytes and in PTX as digits, wherever it stands.
void makeUnique(std::vector<char>& image, const std::string& digits) {
  const uint32_t old = 1'234'567'890, fresh = static_cast<uint32_t>(std::stoul(digits));
  const std::string oldText = std::to_string(old), freshText = std::to_string(fresh);
  if (freshText.size() != oldText.size()) throw std::runtime_error("the module's number needs ten digits");
  const std::string_view oldBytes(reinterpret_cast<const char*>(&old), sizeof old);
  const std::string_view freshBytes(reinterpret_cast<const char*>(&fresh), sizeof fresh);
  unsigned found = 0;
  const auto replace = [&](std::string_view what, std::string_view with) {
    for (auto at = image.begin();
         (at = std::search(at, image.end(), what.begin(), what.end())) != image.end(); ++found)
      at = std::copy(with.begin(), with.end(), at);
  };
  replace(oldBytes, freshBytes);
  replace(oldText, freshText);
  if (found == 0) throw std::runtime_error("the module's marker was not found");
}

int loadModule(const std::string& digits) {
  Gpu gpu(0);
  std::vector<char> image = readBeside("perf-module.fatbin");
  makeUnique(image, digits);
  CUmodule module = nullptr;
  CUfunction entry = nullptr;
  const auto from = Clock::now();
  ok(cuda().cuModuleLoadData(&module, image.data()));
  ok(cuda().cuModuleGetFunction(&entry, module, "entry"));
  ok(cuda().cuLaunchKernel(entry, 1, 1, 1, 1, 1, 1, 0, gpu.stream(), nullptr, nullptr));
  gpu.synchronize();
  std::printf("{\"ns\":%lld,\"image\":%zu}\n", static_cast<long long>(nanoseconds(Clock::now() - from)),
              image.size());
  ok(cuda().cuModuleUnload(module));
  return 0;
}

long residentKiB() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmRSS:")) return std::stol(line.substr(6));
  throw std::runtime_error("/proc/self/status has no VmRSS");
}

int memory() {
  const long before = residentKiB();
  Gpu gpu(0);
  gpu.launchEmpty();
  gpu.synchronize();
  std::printf("{\"before\":%ld,\"after\":%ld}\n", before, residentKiB());
  std::fflush(stdout);
  char byte;
  while (::read(STDIN_FILENO, &byte, 1) > 0) {
  }
  return 0;
}

int run(int argc, char** argv) {
  const auto begin = Clock::now();
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "cases") return runCases(readOptions(argc - 2, argv + 2));
  if (mode == "probe") return probe();
  if (mode == "start") return start(begin);
  if (mode == "module" && argc == 3) return loadModule(argv[2]);
  if (mode == "memory") return memory();
  std::fprintf(stderr, "usage: perf-cases cases|probe|start|module N|memory; perf/measure runs it\n");
  return 2;
}

}  // namespace
}  // namespace gpupool::perf

int main(int argc, char** argv) {
  try {
    return gpupool::perf::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "perf-cases: %s\n", error.what());
    return 1;
  }
}
