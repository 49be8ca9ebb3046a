// Green contexts: parts of a device's multiprocessors. What the driver says of a part stays here: the client
// names it by the calls that make it, and they are made again.
#include <algorithm>

#include "server/worker/serve.h"

namespace gpupool::server {
namespace {

using SmResource = GPUPOOL_ROW(sessionSmResource);
using SmSplit = GPUPOOL_ROW(sessionSmSplit);
using GreenCreate = GPUPOOL_ROW(sessionGreenCreate);
using GreenDestroy = GPUPOOL_ROW(cuGreenCtxDestroy);
using GreenStream = GPUPOOL_ROW(cuGreenCtxStreamCreate);
using schema::SmSource;

// Drivers before CUDA 12.5 lack some.
bool hasGreenContexts(const Driver& driver) {
  return driver.cuDeviceGetDevResource != nullptr && driver.cuGreenCtxGetDevResource != nullptr &&
         driver.cuDevSmResourceSplitByCount != nullptr && driver.cuDevResourceGenerateDesc != nullptr &&
         driver.cuGreenCtxCreate != nullptr && driver.cuGreenCtxDestroy != nullptr &&
         driver.cuGreenCtxStreamCreate != nullptr && driver.cuStreamGetGreenCtx != nullptr;
}

// All of the device or of the green context. The handle in `source` is the driver's.
CUresult wholeOf(Session& session, const SmSource& source, CUdevResourceType type, CUdevResource& whole) {
  const Driver& driver = session.driver();
  if (!hasGreenContexts(driver)) return CUDA_ERROR_NOT_SUPPORTED;
  if (source.green != nullptr) return driver.cuGreenCtxGetDevResource(source.green, &whole, type);
  CUdevice device = 0;
  if (!session.objects().device(source.device, device)) return CUDA_ERROR_INVALID_DEVICE;
  return driver.cuDeviceGetDevResource(device, &whole, type);
}

struct Parts {
  std::vector<CUdevResource> groups;
  CUdevResource rest{};
};

CUresult split(Session& session, const SmSource& source, Parts& parts) {
  if (source.wanted == 0 || source.wanted > schema::kMostSmGroups) return CUDA_ERROR_INVALID_VALUE;
  CUdevResource whole{};
  CUresult status = wholeOf(session, source, CU_DEV_RESOURCE_TYPE_SM, whole);
  if (status != CUDA_SUCCESS) return status;
  parts.groups.resize(source.wanted);
  unsigned count = source.wanted;
  status = session.driver().cuDevSmResourceSplitByCount(parts.groups.data(), &count, &whole, &parts.rest,
                                                        source.flags, source.minCount);
  parts.groups.resize(std::min(count, source.wanted));
  return status;
}

void smResource(Session& session, Call& call) {
  Served<SmResource> served(session, call);
  if (!served.open()) return;
  if (!served.get<"source">().wanted()) return served.close(CUDA_ERROR_INVALID_VALUE);
  CUdevResource whole{};
  const CUresult status =
      wholeOf(session, served.get<"source">().plain(), served.get<"type">().value(), whole);
  served.get<"sm">().plain() = whole.sm;
  served.close(status);
}

void smSplit(Session& session, Call& call) {
  Served<SmSplit> served(session, call);
  if (!served.open()) return;
  if (!served.get<"source">().wanted()) return served.close(CUDA_ERROR_INVALID_VALUE);
  const SmSource& source = served.get<"source">().plain();
  auto& count = served.get<"count">().plain();
  if (served.get<"simulate">().value() != 0) {
    CUdevResource whole{};
    unsigned groups = 0;
    CUresult status = wholeOf(session, source, CU_DEV_RESOURCE_TYPE_SM, whole);
    if (status == CUDA_SUCCESS)
      status = session.driver().cuDevSmResourceSplitByCount(nullptr, &groups, &whole, nullptr, source.flags,
                                                            source.minCount);
    count = groups;
    return served.close(status);
  }
  Parts parts;
  const CUresult status = split(session, source, parts);
  auto& groups = served.get<"groups">().array();
  count = status == CUDA_SUCCESS ? std::min(parts.groups.size(), groups.size()) : 0;
  for (size_t i = 0; i < count; ++i) groups[i] = parts.groups[i].sm;
  if (parts.rest.type == CU_DEV_RESOURCE_TYPE_SM) served.get<"rest">().plain() = parts.rest.sm;
  served.close(status);
}

bool ofOneSplit(const SmSource& a, const SmSource& b) {
  return a.green == b.green && a.device == b.device && a.split == b.split && a.flags == b.flags &&
         a.minCount == b.minCount && a.wanted == b.wanted;
}

// What the driver makes a green context of: all of something, or parts of splits, each of which is made once.
CUresult resourcesOf(Session& session, const std::vector<SmSource>& sources,
                     std::vector<CUdevResource>& resources) {
  if (sources.empty() || sources.size() > schema::kMostSmGroups) return CUDA_ERROR_INVALID_VALUE;
  const SmSource& first = sources.front();
  if (first.split == 0) {
    if (sources.size() != 1) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    return wholeOf(session, first, CU_DEV_RESOURCE_TYPE_SM, resources.emplace_back());
  }
  std::vector<std::pair<const SmSource*, Parts>> splits;
  for (const SmSource& source : sources) {
    if (source.device != first.device || source.split == 0) return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    auto made = std::ranges::find_if(splits, [&](const auto& one) { return ofOneSplit(*one.first, source); });
    if (made == splits.end()) {
      made = splits.insert(made, {&source, {}});
      if (CUresult status = split(session, source, made->second); status != CUDA_SUCCESS) return status;
    }
    const Parts& parts = made->second;
    if (source.part != schema::kSmRest && source.part >= parts.groups.size()) return CUDA_ERROR_INVALID_VALUE;
    resources.push_back(source.part == schema::kSmRest ? parts.rest : parts.groups[source.part]);
  }
  return CUDA_SUCCESS;
}

void createGreen(Session& session, Call& call) {
  Served<GreenCreate> served(session, call);
  if (!served.open()) return;
  const Driver& driver = session.driver();
  const auto& parts = served.get<"parts">().array();
  const CUdevice device = served.get<"device">().value();
  std::vector<CUdevResource> resources;
  CUresult status = resourcesOf(session, parts, resources);
  CUdevResourceDesc description = nullptr;
  if (status == CUDA_SUCCESS)
    status = driver.cuDevResourceGenerateDesc(&description, resources.data(),
                                              static_cast<unsigned>(resources.size()));
  PlaceGlobals place;
  auto& green = served.get<"green">();
  if (status == CUDA_SUCCESS)
    status = driver.cuGreenCtxCreate(green.pass(), description, device, served.get<"flags">().value());
  if (status == CUDA_SUCCESS) session.greens()[green.id()] = device;
  served.close(status);
}

// Afterwards the driver takes the handles of its streams for pointers to what is no more: they end first. A
// client has ended them itself.
void endStreams(Session& session, CUgreenCtx green) {
  const Driver& driver = session.driver();
  std::vector<uint64_t> ended;
  session.objects().forEach(HandleKind::stream, [&](uint64_t id, uint64_t real) {
    auto* const stream = reinterpret_cast<CUstream>(real);
    CUgreenCtx its = nullptr;
    if (driver.cuStreamGetGreenCtx(stream, &its) != CUDA_SUCCESS || its != green) return;
    driver.cuStreamDestroy_v2(stream);
    ended.push_back(id);
  });
  for (const uint64_t id : ended) session.objects().retire(id);
}

void destroyGreen(Session& session, Call& call) {
  Served<GreenDestroy> served(session, call);
  if (!served.open()) return;
  if (!hasGreenContexts(session.driver())) return served.close(CUDA_ERROR_NOT_SUPPORTED);
  auto unasked = session.words().contextEnds(nullptr);
  endStreams(session, served.get<"hCtx">().value());
  session.greens().erase(served.get<"hCtx">().id());
  served.close(served.invoke(session.driver().cuGreenCtxDestroy));
}

}  // namespace

void endGreens(Session& session, CUdevice device) {
  for (auto at = session.greens().begin(); at != session.greens().end();) {
    CUgreenCtx green = nullptr;
    if (at->second != device || !session.objects().find(at->first, green)) {
      ++at;
      continue;
    }
    endStreams(session, green);
    session.driver().cuGreenCtxDestroy(green);
    session.objects().retire(at->first);
    at = session.greens().erase(at);
  }
}

void addGreenHandlers(HandlerTable& table) {
  table.add<SmResource>(&smResource);
  table.add<SmSplit>(&smSplit);
  table.add<GreenCreate>(&createGreen);
  table.add<GreenDestroy>(&destroyGreen);
  table.add<GreenStream>(&servePlacing<GreenStream, &Driver::cuGreenCtxStreamCreate>);
}

}  // namespace gpupool::server
