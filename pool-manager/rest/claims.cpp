#include "pool-manager/rest/claims.h"

#include <stdexcept>
#include <string_view>

#include "pool-manager/claims.h"
#include "pool-manager/convert.h"
#include "pool-manager/device_filter.h"
#include "pool-manager/listing_json.h"

namespace gpupool::pool::rest {
namespace {

Priority priorityOf(const std::string& text) {
  for (const auto priority : {Priority::low, Priority::normal, Priority::high})
    if (text == name(priority)) return priority;
  if (text.empty()) return Priority::normal;
  refuse({400, "bad_field", "'priority' is not low, normal or high"});
}

// As whoever asks may name it: the pool checks that.
std::string tenantOf(const Request& request) {
  const std::string named = text(request, "tenant");
  return named.empty() ? request.who.tenant : named;
}

std::string gpuOf(const Request& request) {
  std::string gpu = text(request, "gpu");
  try {
    parseDeviceFilter(gpu);
  } catch (const std::invalid_argument& error) {
    const std::string_view why = error.what(), option = "--gpu: ";
    refuse(
        {400, "bad_field", "'gpu': " + std::string(why.substr(why.starts_with(option) ? option.size() : 0))});
  }
  return gpu;
}

uint64_t memoryOf(const Request& request) {
  const uint64_t bytes = request.counts.at("memoryBytes");
  if (bytes != 0 && bytes < kLeastMemory)
    refuse({400, "bad_field", "'memoryBytes': 0, or at least " + std::to_string(kLeastMemory) + " (1 MiB)"});
  return bytes;
}

std::string jobOf(const Request& request) {
  std::string job = text(request, "job");
  try {
    checkJob(job);
  } catch (const std::invalid_argument& error) {
    refuse({400, "bad_field", error.what()});
  }
  return job;
}

}  // namespace

LeaseRequest leaseWish(const Request& request, const std::string& job) {
  const auto count = [&](const char* name) { return request.counts.at(name); };
  LeaseRequest wish;
  wish.job = job;
  wish.tenant = tenantOf(request);
  wish.holder = "REST, from " + request.peer;
  wish.deviceCount = static_cast<uint32_t>(count("devices"));
  wish.memoryBytes = memoryOf(request);
  wish.gpu = gpuOf(request);
  wish.server = text(request, "server");
  wish.policy = flag(request, "spread") ? Policy::spread : Policy::pack;
  wish.reason = text(request, "reason");
  wish.turns = {static_cast<uint32_t>(count("sharePercent")), priorityOf(text(request, "priority")), 0};
  wish.turns.protectByTenant = true;
  wish.limitMs = count("limitMs");
  if (job.empty()) return wish;  // nobody leases: it is explained
  wish.ttlMs = static_cast<uint32_t>(count("unusedMs"));
  wish.waitMs = static_cast<uint32_t>(count("waitMs"));
  return wish;
}

kj::Promise<Answer> describeClaim(const Context& context, const Request& request, const Id& id) {
  return context.service.managerFor(request.who).leasesRequest().send().then([id](auto&& response) -> Answer {
    for (auto one : response.getLeases())
      if (read(one.getId()) == id) return {200, toJson(read(one))};
    refuse({404, "lease_ended", "the claim has ended already"});
  });
}

kj::Promise<Answer> listClaims(const Context& context, const Request& request) {
  return context.service.managerFor(request.who).leasesRequest().send().then([](auto&& response) -> Answer {
    Json list = Json::array();
    for (auto one : response.getLeases())
      if (one.getJob().size() != 0) list.push_back(toJson(read(one)));
    return {200, {{"claims", std::move(list)}}};
  });
}

kj::Promise<Answer> createClaim(const Context& context, const Request& request) {
  auto order = context.service.managerFor(request.who).leaseRequest();
  write(leaseWish(request, jobOf(request)), order.initRequest());
  return order.send().then([context, request](auto&& response) {
    return describeClaim(context, request, read(response.getLease().getId()));
  });
}

kj::Promise<Answer> releaseClaim(const Context& context, const Request& request) {
  const std::string& claim = request.named.at("claim");
  auto order = context.service.managerFor(request.who).releaseRequest();
  order.setClaim(claim);
  order.setTenant(tenantOf(request));
  return order.send().then(
      [claim](auto&&) -> Answer { return {200, {{"claim", claim}, {"state", "ended"}}}; });
}

}  // namespace gpupool::pool::rest
