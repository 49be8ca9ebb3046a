// Servers that come, go and are lost, for the audit log.
#include "pool-manager/pool.h"

namespace gpupool::pool {

void Pool::noteServer(const std::string& name, AuditEvent event, const std::string& why, uint64_t now) {
  if (times_.auditEntries == 0) return;
  if (auto entry = serverLog_.note(name, event, why, now)) tellOfServer(std::move(*entry));
}

void Pool::tellOfServer(AuditEntry entry) {
  const std::string name = entry.server;
  write({}, {std::move(entry)}, [this, name](const std::string& why) {
    if (!why.empty()) serverLog_.refused(name, latestMs_);
  });
}

// With each beat.
void Pool::noteAlive(ServerRecord& server, uint64_t now) {
  if (server.told) return;
  server.told = true;
  noteServer(server.facts.name, AuditEvent::serverAlive, server.arrival, now);
  server.arrival = "it is heard of again";
}

void Pool::noteGone(ServerRecord& server, AuditEvent event, const std::string& why, uint64_t now) {
  if (!server.told) return;
  server.told = false;
  noteServer(server.facts.name, event, why, now);
}

void Pool::tickServerLog(uint64_t now) {
  touchSilent(now);
  if (!comparedLog_ && now >= settledMs_) {
    comparedLog_ = true;
    for (const std::string& name : serverLog_.alive()) {
      const auto at = servers_.find(name);
      if (at == servers_.end() || !at->second.told)
        noteServer(name, AuditEvent::serverLost, "it has not come back since the manager was started", now);
    }
  }
  for (AuditEntry& entry : serverLog_.due(now)) tellOfServer(std::move(entry));
}

}  // namespace gpupool::pool
