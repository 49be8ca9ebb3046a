// Launches: one packed parameter buffer, handed to the driver as it came.
#include <malloc.h>

#include <algorithm>

#include "server/worker/serve.h"

namespace gpupool::server {
namespace {

using Launch = GPUPOOL_ROW(sessionLaunch);
using LaunchAttributes = GPUPOOL_ROW(sessionLaunchAttributes);
using TpcMap = GPUPOOL_ROW(sessionTpcMap);
constexpr size_t kMaxAttributes = 64;

void launch(Session& session, Call& call) {
  Served<Launch> served(session, call);
  if (!served.open()) return;
  const schema::LaunchShape& shape = served.get<"shape">().value();
  auto& parameters = served.get<"parameters">().array();
  auto& attributes = served.get<"attributes">().array();
  if (attributes.size() > kMaxAttributes) return served.close(CUDA_ERROR_INVALID_VALUE);
  size_t bytes = parameters.size();
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, parameters.data(), CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes,
                   CU_LAUNCH_PARAM_END};
  void** buffer = bytes == 0 ? nullptr : extra;
  CUfunction function = served.get<"function">().value();
  CUstream stream = served.get<"stream">().value();
  const Driver& driver = session.driver();
  if (attributes.empty() && shape.cooperative == 0)
    return served.close(driver.cuLaunchKernel(function, shape.grid[0], shape.grid[1], shape.grid[2],
                                              shape.block[0], shape.block[1], shape.block[2],
                                              shape.sharedBytes, stream, nullptr, buffer));
  if (shape.cooperative != 0) {
    CUlaunchAttribute cooperative{};
    cooperative.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    cooperative.value.cooperative = 1;
    attributes.push_back(cooperative);
  }
  CUlaunchConfig config{shape.grid[0],     shape.grid[1],
                        shape.grid[2],     shape.block[0],
                        shape.block[1],    shape.block[2],
                        shape.sharedBytes, stream,
                        attributes.data(), static_cast<unsigned>(attributes.size())};
  served.close(driver.cuLaunchKernelEx(&config, function, nullptr, buffer));
}

void launchAttributes(Session& session, Call& call) {
  Served<LaunchAttributes> served(session, call);
  if (!served.open()) return;
  const schema::LaunchShape& shape = served.get<"shape">().plain();
  auto& attributes = served.get<"attributes">().array();
  CUlaunchConfig config{shape.grid[0],     shape.grid[1],
                        shape.grid[2],     shape.block[0],
                        shape.block[1],    shape.block[2],
                        shape.sharedBytes, nullptr,
                        attributes.data(), static_cast<unsigned>(attributes.size())};
  CUfunction function = served.get<"function">().value();
  int* value = &served.get<"value">().plain();
  served.close(served.get<"clusters">().value() != 0
                   ? session.driver().cuOccupancyMaxActiveClusters(value, function, &config)
                   : session.driver().cuOccupancyMaxPotentialClusterSize(value, function, &config));
}

// The driver has no public name for it: slot 4 of an export table allocates two arrays of a byte per TPC,
// slot 13 frees them (measured on 580.159; cuBLASLt calls them so).
void tpcMap(Session& session, Call& call) {
  Served<TpcMap> served(session, call);
  if (!served.open()) return;
  constexpr CUuuid kTable{{'\x17', '\x34', '\xdc', '\x26', '\x80', '\x0d', '\x47', '\x45', '\x87', '\x26',
                           '\xc0', '\xf1', '\xe7', '\xdd', '\x8b', '\xca'}};
  const void* table = nullptr;
  const Driver& driver = session.driver();
  CUdevice device = 0;
  int multiprocessors = 0;
  if (driver.cuGetExportTable(&table, &kTable) != CUDA_SUCCESS || table == nullptr ||
      *static_cast<const size_t*>(table) < 14 * sizeof(void*))
    return served.close(CUDA_ERROR_NOT_SUPPORTED);
  CUresult status = driver.cuCtxGetDevice(&device);
  if (status == CUDA_SUCCESS)
    status = driver.cuDeviceGetAttribute(&multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
  auto slots = static_cast<void* const*>(table);
  unsigned char *gpcs = nullptr, *ranks = nullptr;
  if (status == CUDA_SUCCESS)
    status = reinterpret_cast<CUresult (*)(unsigned char**, unsigned char**)>(slots[4])(&gpcs, &ranks);
  if (status != CUDA_SUCCESS) return served.close(status);
  auto& toGpcs = served.get<"gpcs">().array();
  auto& toRanks = served.get<"ranks">().array();
  // How many there are the table does not say. A TPC has two multiprocessors (Volta and later). Behind them
  // lies what malloc had there, which is not the client's, and differs in a session that is made again.
  size_t count = std::min({(static_cast<size_t>(multiprocessors) + 1) / 2, malloc_usable_size(gpcs),
                           malloc_usable_size(ranks), toGpcs.size(), toRanks.size()});
  std::copy_n(gpcs, count, toGpcs.begin());
  std::copy_n(ranks, count, toRanks.begin());
  served.get<"count">().plain() = count;
  reinterpret_cast<CUresult (*)(unsigned char*, unsigned char*)>(slots[13])(gpcs, ranks);
  served.close(CUDA_SUCCESS);
}

}  // namespace

void addLaunchHandlers(HandlerTable& table) {
  table.add<Launch>(&launch);
  table.add<LaunchAttributes>(&launchAttributes);
  table.add<TpcMap>(&tpcMap);
}

}  // namespace gpupool::server
