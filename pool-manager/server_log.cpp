#include "pool-manager/server_log.h"

#include <algorithm>
#include <utility>

namespace gpupool::pool {
namespace {

constexpr uint64_t kRetryMs = 10'000;  // what the store has refused is tried again after this

bool isOfServer(AuditEvent event) {
  return event == AuditEvent::serverAlive || event == AuditEvent::serverLost ||
         event == AuditEvent::serverLeft;
}

void earn(unsigned& credit, uint64_t& sinceMs, unsigned most, uint64_t everyMs, uint64_t now) {
  const uint64_t earned = (now - sinceMs) / everyMs;
  credit = static_cast<unsigned>(std::min<uint64_t>(most, credit + earned));
  sinceMs += earned * everyMs;
}

}  // namespace

void ServerLog::load(const std::deque<AuditEntry>& entries) {
  for (const AuditEntry& entry : entries) {
    if (!isOfServer(entry.event)) continue;
    Server& server = servers_[entry.server];
    server.told = server.is = entry.event;
  }
}

std::optional<AuditEntry> ServerLog::note(const std::string& name, AuditEvent event, const std::string& why,
                                          uint64_t now) {
  Server& server = servers_[name];
  if (server.is == event && server.told) return std::nullopt;
  server.is = event;
  server.why = why;
  server.changedMs = now;
  return tell(name, server, now);
}

std::optional<AuditEntry> ServerLog::tell(const std::string& name, Server& server, uint64_t now) {
  earn(server.credit, server.creditMs, kMostCredit, kCreditEveryMs, now);
  earn(creditOfAll_, creditOfAllMs_, kMostOfAll, kOfAllEveryMs, now);
  if (server.credit == 0 || creditOfAll_ == 0 || now < server.notBeforeMs) {
    server.untold += server.credit == 0;
    putOff_.insert(name);
    return std::nullopt;
  }
  putOff_.erase(name);
  if (server.told == server.is) return std::nullopt;
  const unsigned untold = std::exchange(server.untold, 0);
  --server.credit;
  --creditOfAll_;
  server.told = server.is;
  AuditEntry entry;
  entry.event = server.is;
  entry.server = name;
  entry.by = "the manager";
  entry.reason = server.why;
  if (untold > 1) entry.reason += "; it has come and gone meanwhile, which is told no more often";
  return entry;
}

std::vector<AuditEntry> ServerLog::due(uint64_t now) {
  std::vector<AuditEntry> entries;
  if (creditOfAll_ == 0 && now < creditOfAllMs_ + kOfAllEveryMs) return entries;
  for (const std::string& name : std::set<std::string>(putOff_)) {
    Server& server = servers_.at(name);
    const bool waits = server.credit == 0 && now < server.creditMs + kCreditEveryMs;
    if (waits || now < server.notBeforeMs) continue;
    if (auto entry = tell(name, server, now)) entries.push_back(std::move(*entry));
  }
  return entries;
}

void ServerLog::refused(const std::string& name, uint64_t now) {
  const auto at = servers_.find(name);
  if (at == servers_.end()) return;
  Server& server = at->second;
  server.told.reset();
  server.credit = std::min(kMostCredit, server.credit + 1);
  creditOfAll_ = std::min(kMostOfAll, creditOfAll_ + 1);
  server.notBeforeMs = now + kRetryMs;
  putOff_.insert(name);
}

std::vector<std::string> ServerLog::alive() const {
  std::vector<std::string> names;
  for (const auto& [name, server] : servers_)
    if (server.is == AuditEvent::serverAlive) names.push_back(name);
  return names;
}

void ServerLog::forget(uint64_t now, uint64_t awayMs) {
  std::erase_if(servers_, [&](const auto& one) {
    return one.second.is != AuditEvent::serverAlive && !putOff_.contains(one.first) &&
           now > one.second.changedMs + awayMs;
  });
}

}  // namespace gpupool::pool
