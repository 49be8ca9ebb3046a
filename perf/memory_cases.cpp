// Allocation, copies and fills.

#include <initializer_list>
#include <memory>

#include "perf/cases.h"
#include "perf/driver.h"

namespace gpupool::perf {
namespace {

constexpr size_t kKi = size_t{1} << 10, kMi = size_t{1} << 20, kGi = size_t{1} << 30;

void addCopies(std::vector<Case>& cases, size_t bytes) {
  const std::string size = sizeName(bytes);
  const auto add = [&](const std::string& name, const std::function<void(Gpu&)>& copy) {
    cases.push_back({.name = name + "-" + size,
                     .make = [copy](Gpu& gpu) -> Steps {
                       copy(gpu);  // makes the buffers
                       return {{}, [&gpu, copy] { copy(gpu); }, {}};
                     },
                     .bytes = bytes});
  };
  add("copy-pinned-htod", [=](Gpu& gpu) { ok(cuda().cuMemcpyHtoD(gpu.device(), gpu.pinned(), bytes)); });
  add("copy-pinned-dtoh", [=](Gpu& gpu) { ok(cuda().cuMemcpyDtoH(gpu.pinned(), gpu.device(), bytes)); });
  add("copy-pinned-async-htod", [=](Gpu& gpu) {
    ok(cuda().cuMemcpyHtoDAsync(gpu.device(), gpu.pinned(), bytes, gpu.stream()));
    gpu.synchronize();
  });
  add("copy-pinned-async-dtoh", [=](Gpu& gpu) {
    ok(cuda().cuMemcpyDtoHAsync(gpu.pinned(), gpu.device(), bytes, gpu.stream()));
    gpu.synchronize();
  });
  add("copy-pageable-htod", [=](Gpu& gpu) { ok(cuda().cuMemcpyHtoD(gpu.device(), gpu.pageable(), bytes)); });
  add("copy-pageable-dtoh", [=](Gpu& gpu) { ok(cuda().cuMemcpyDtoH(gpu.pageable(), gpu.device(), bytes)); });
}

// As NVIDIA's simpleStreams: ordinary memory is registered, and streams copy a part of it each, behind a
// kernel. The calls alone: a copy of registered memory must not wait for its stream.
struct Registered {
  static constexpr int kStreams = 4;
  explicit Registered(size_t bytes) : part(bytes / kStreams), memory(new char[bytes]()) {
    ok(cuda().cuMemHostRegister(memory.get(), bytes, CU_MEMHOSTREGISTER_DEVICEMAP));
    for (CUstream& stream : streams) ok(cuda().cuStreamCreate(&stream, CU_STREAM_DEFAULT));
  }
  ~Registered() {
    for (CUstream stream : streams) cuda().cuStreamDestroy(stream);
    cuda().cuMemHostUnregister(memory.get());
  }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;

  const size_t part;
  std::unique_ptr<char[]> memory;
  CUstream streams[kStreams] = {};
};

void addRegistered(std::vector<Case>& cases, size_t bytes) {
  const auto add = [&](const std::string& name, bool toDevice) {
    cases.push_back({.name = name + "-" + sizeName(bytes),
                     .make = [=](Gpu& gpu) -> Steps {
                       auto all = std::make_shared<Registered>(bytes);
                       CUdeviceptr device = gpu.device();
                       return {{},
                               [=, &gpu] {
                                 for (int s = 0; s < Registered::kStreams; ++s) {
                                   const CUdeviceptr at = device + s * all->part;
                                   char* host = all->memory.get() + s * all->part;
                                   gpu.launchEmpty();
                                   ok(toDevice
                                          ? cuda().cuMemcpyHtoDAsync(at, host, all->part, all->streams[s])
                                          : cuda().cuMemcpyDtoHAsync(host, at, all->part, all->streams[s]));
                                 }
                                 for (CUstream stream : all->streams) ok(cuda().cuStreamSynchronize(stream));
                               },
                               {}};
                     },
                     .bytes = bytes});
  };
  add("copy-registered-four-streams-htod", true);
  add("copy-registered-four-streams-dtoh", false);
  cases.push_back(
      {.name = "launch-synchronize-beside-registered-" + sizeName(bytes), .make = [=](Gpu& gpu) -> Steps {
         auto all = std::make_shared<Registered>(bytes);
         return {{},
                 [all, &gpu] {
                   gpu.launchEmpty();
                   gpu.synchronize();
                 },
                 {}};
       }});
}

void addOnDevice(std::vector<Case>& cases, size_t bytes) {
  cases.push_back({.name = "copy-on-device-" + sizeName(bytes),
                   .make = [=](Gpu& gpu) -> Steps {
                     gpu.dropHostBuffers();
                     CUdeviceptr from = gpu.device(), to = gpu.otherDevice();
                     return {{},
                             [=, &gpu] {
                               ok(cuda().cuMemcpyDtoDAsync(to, from, bytes, gpu.stream()));
                               gpu.synchronize();
                             },
                             {}};
                   },
                   .bytes = bytes});
  cases.push_back({.name = "memset-" + sizeName(bytes),
                   .make = [=](Gpu& gpu) -> Steps {
                     gpu.dropHostBuffers();
                     CUdeviceptr to = gpu.device();
                     return {{},
                             [=, &gpu] {
                               ok(cuda().cuMemsetD32Async(to, 7, bytes / 4, gpu.stream()));
                               gpu.synchronize();
                             },
                             {}};
                   },
                   .bytes = bytes});
}

void addAllocation(std::vector<Case>& cases, size_t bytes) {
  const auto alloc = [bytes](Gpu&) -> Steps {
    auto address = std::make_shared<CUdeviceptr>(0);
    return {
        {}, [=] { ok(cuda().cuMemAlloc(address.get(), bytes)); }, [=] { ok(cuda().cuMemFree(*address)); }};
  };
  const auto free = [bytes](Gpu&) -> Steps {
    auto address = std::make_shared<CUdeviceptr>(0);
    return {
        [=] { ok(cuda().cuMemAlloc(address.get(), bytes)); }, [=] { ok(cuda().cuMemFree(*address)); }, {}};
  };
  cases.push_back({.name = "alloc-first-" + sizeName(bytes), .make = alloc, .once = true});
  cases.push_back({"alloc-" + sizeName(bytes), alloc});
  cases.push_back({"free-" + sizeName(bytes), free});
}

}  // namespace

std::string sizeName(size_t bytes) {
  if (bytes >= kGi) return std::to_string(bytes / kGi) + "GiB";
  if (bytes >= kMi) return std::to_string(bytes / kMi) + "MiB";
  if (bytes >= kKi) return std::to_string(bytes / kKi) + "KiB";
  return std::to_string(bytes) + "B";
}

void addAllocationCases(std::vector<Case>& cases, size_t largest) {
  for (size_t bytes : {4 * kKi, 64 * kKi, kMi, 64 * kMi, 256 * kMi, kGi})
    if (bytes <= largest) addAllocation(cases, bytes);
}

void addCopyCases(std::vector<Case>& cases, size_t largest, bool quick) {
  cases.push_back({.name = "launch-read-back-4B", .make = [](Gpu& gpu) -> Steps {
                     auto word = std::make_shared<uint32_t>(0);
                     CUdeviceptr from = gpu.device();
                     return {{},
                             [&gpu, word, from] {
                               gpu.launchEmpty();
                               ok(cuda().cuMemcpyDtoHAsync(word.get(), from, sizeof *word, gpu.stream()));
                               gpu.synchronize();
                             },
                             {}};
                   }});
  for (size_t bytes : {size_t{4}, 4 * kKi, 64 * kKi, kMi, 16 * kMi, 256 * kMi, kGi})
    if (bytes <= largest && !(quick && bytes == 64 * kKi)) addCopies(cases, bytes);
  // Over a network pinned memory has a copy on each side: what does a launch pay for keeping them alike?
  cases.push_back({"launch-synchronize-beside-pinned-" + sizeName(largest), [](Gpu& gpu) -> Steps {
                     gpu.pinned();
                     return {{},
                             [&gpu] {
                               gpu.launchEmpty();
                               gpu.synchronize();
                             },
                             {}};
                   }});
  for (size_t bytes : {kMi, 64 * kMi})
    if (bytes <= largest) addRegistered(cases, bytes);
  for (size_t bytes : {kMi, 256 * kMi})
    if (bytes <= largest) addOnDevice(cases, bytes);
}

}  // namespace gpupool::perf
