// Which versions of gpupool the programs of a lease are of: what its holders say of that outlives the
// manager.
#include <algorithm>

#include "pool-manager/pool.h"

namespace gpupool::pool {

std::vector<WorkerVersion> clientsOf(const LeaseRecord& record) {
  std::vector<WorkerVersion> all = record.clients;
  for (const auto& [id, one] : record.adoptions)
    for (const WorkerVersion& client : one.adopter.clients)
      if (std::find(all.begin(), all.end(), client) == all.end()) all.push_back(client);
  if (all.empty() && record.client.rowsHash != 0) all.push_back(record.client);
  return all;
}

// What the store says already, or the request. If it cannot be written, the next renewal tries again.
void Pool::storeClients(LeaseRecord& record) {
  auto clients = clientsOf(record);
  const bool asRequested =
      !record.clientsInStore && clients.size() <= 1 && (clients.empty() || clients.front() == record.client);
  if (asRequested || record.storingClients || clients == record.storedClients) return;
  record.storingClients = record.clientsInStore = true;
  std::string text = encodeClients(clients);
  write({{kClientsPrefix + record.id.text(), std::move(text)}}, {},
        [this, id = record.id, clients = std::move(clients)](const std::string& why) mutable {
          const auto at = leases_.quietly().find(id);
          if (at == leases_.quietly().end()) return;
          at->second.storingClients = false;
          if (why.empty()) at->second.storedClients = std::move(clients);
        });
}

void Pool::loadClients(const std::vector<Entry>& stored, uint64_t now) {
  for (const Entry& entry : stored) {
    const auto id = Id::parse(entry.key.substr(kClientsPrefix.size()));
    const auto at = id ? leases_.find(*id) : leases_.end();
    if (at == leases_.end()) continue;
    LeaseRecord& record = at->second;
    record.clients = record.storedClients = decodeClients(entry.value);
    record.clientsInStore = true;
    if (!record.job.empty()) record.clientsUntilMs = now + record.ttlMs + times_.driftMs;
  }
}

}  // namespace gpupool::pool
