#include "server/front/lease_tally.h"

#include "schema/convert.h"

namespace gpupool::server {

void LeaseTally::add(const Id& lease, const SessionCounts& more) {
  SessionCounts& sum = counts_[lease];
  sum.calls += more.calls;
  sum.awaited += more.awaited;
  sum.toDeviceBytes += more.toDeviceBytes;
  sum.fromDeviceBytes += more.fromDeviceBytes;
}

void LeaseTally::report(const std::map<Id, kj::Duration>& ages,
                        kj::Function<capnp::List<schema::LeaseCounts>::Builder(unsigned)> room) {
  for (const auto& [lease, age] : ages) counts_.try_emplace(lease);
  std::erase_if(counts_, [this](const auto& one) { return !leases_.contains(one.first); });
  auto list = room(static_cast<unsigned>(counts_.size()));
  unsigned at = 0;
  for (const auto& [lease, sum] : counts_) {
    auto out = list[at++];
    schema::write(lease, out.initId());
    out.setCalls(sum.calls);
    out.setAwaited(sum.awaited);
    out.setToDeviceBytes(sum.toDeviceBytes);
    out.setFromDeviceBytes(sum.fromDeviceBytes);
    if (const auto age = ages.find(lease); age != ages.end())
      out.setCheckpointAgeMs(static_cast<int64_t>(age->second / kj::MILLISECONDS));
  }
}

}  // namespace gpupool::server
