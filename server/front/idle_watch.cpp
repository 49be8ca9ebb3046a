#include "server/front/idle_watch.h"

#include <vector>

#include "schema/convert.h"

namespace gpupool::server {

void IdleWatch::report(kj::Function<capnp::List<schema::LeaseUse>::Builder(unsigned)> room) {
  std::vector<const Grant*> watched;
  for (const auto& [id, lease] : leases_.all())
    if (lease.idleMs != 0 && !lease.closing) watched.push_back(&lease);
  std::erase_if(seen_, [this](const auto& one) { return !leases_.contains(one.first); });
  const kj::TimePoint now = timer_.now();
  auto list = room(static_cast<unsigned>(watched.size()));
  for (unsigned i = 0; i < list.size(); ++i) {
    const Grant& lease = *watched[i];
    const Mark mark{lease.sessionEpochs.size(), sessions_.use(lease.id)};
    const bool suspended = lease.suspended.has_value();
    const bool wanted = sessions_.active(lease.id, suspended) || asked_.contains(lease.id);
    const auto [seen, isNew] = seen_.try_emplace(lease.id, Seen{now, mark});
    if (seen->second.mark != mark || wanted) seen->second = {now, mark};
    schema::write(lease.id, list[i].initId());
    list[i].setIdleMs(static_cast<uint64_t>((now - seen->second.usedAt) / kj::MILLISECONDS));
    list[i].setSessions(mark.use.sessions);
    list[i].setWanted(wanted);
  }
  asked_.clear();
}

}  // namespace gpupool::server
