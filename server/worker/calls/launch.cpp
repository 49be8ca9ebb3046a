// Launches: one packed parameter buffer, handed to the driver as it came.
#include "server/worker/serve.h"

namespace gpupool::server {
namespace {

using Launch = GPUPOOL_ROW(sessionLaunch);
using LaunchAttributes = GPUPOOL_ROW(sessionLaunchAttributes);
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

}  // namespace

void addLaunchHandlers(HandlerTable& table) {
  table.add<Launch>(&launch);
  table.add<LaunchAttributes>(&launchAttributes);
}

}  // namespace gpupool::server
