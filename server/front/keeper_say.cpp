// What people are told of protected sessions: LeaseHindrances.protection.
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "base/options.h"
#include "server/front/keeper.h"

namespace gpupool::server {
namespace {

std::string age(kj::Duration time) {
  return options::formatTime(std::chrono::milliseconds(time / kj::SECONDS * 1000));
}

std::string callsTake(const ClientLog& log) {
  const uint64_t bytes = log.frameBytes + log.payloadBytes;
  return bytes == 0 ? "" : "; the calls since then take " + options::formatSize(bytes);
}

}  // namespace

// Of whoever has the connection; while nobody has, of who is to have it.
std::string Keeper::keeperOf(const Id& lease) const {
  if (desk_.has(lease)) return desk_.who(lease).text();
  const auto at = leases_.all().find(lease);
  return at != leases_.all().end() && at->second.standbyKeeps ? "its standby" : "its holder";
}

// awayKeeper: who keeps its checkpoints, and is not there; empty: he is, or nobody does. Of a session that
// has just come here he may not know yet.
std::string Keeper::describe(const Kept& kept, bool holderKeeps, const std::string& awayKeeper) const {
  if (!awayKeeper.empty())
    return "not protected: " + kept.who + ": " + awayKeeper +
           (kept.shippedOver == 0 ? " has not begun to take its checkpoints here yet"
                                  : ", which keeps its checkpoints, is gone") +
           "; the death of its worker alone it survives" + restoredTimes(kept);
  const kj::TimePoint now = timer_.now();
  const bool replays = kept.log.obstacle.empty();
  if (holderKeeps && kept.shipped == Id{})
    return describeBeginning(
        kept, kept.notShipped.empty() ? "it is not kept away from its server yet" : kept.notShipped);
  const bool behind = holderKeeps && kept.shipped != kept.pages->id;
  const kj::TimePoint at = *madeAt(kept, holderKeeps);
  std::string text = replays ? "protected for " + age(now - kept.since) : "protected only while idle";
  text += ": " + kept.who + ": its checkpoint is " + age(now - at) + " old, " +
          options::formatSize(kept.pages->facts.bytes);
  if (!replays) text += "; since then: " + kept.log.obstacle;
  if (replays) text += callsTake(kept.log);
  if (!kept.why.empty()) text += "; no later one: " + kept.why;
  if (behind && !kept.notShipped.empty())
    text += "; no later one is away from its server: " + kept.notShipped;
  return text + restoredTimes(kept);
}

// Of the checkpoint that the session would go on from; none: there is none.
std::optional<kj::TimePoint> Keeper::madeAt(const Kept& kept, bool holderKeeps) {
  if (kept.pages == nullptr || (holderKeeps && kept.shipped == Id{})) return std::nullopt;
  return holderKeeps && kept.shipped != kept.pages->id ? kept.shippedAt : kept.at;
}

std::map<Id, kj::Duration> Keeper::ages() const {
  std::map<Id, kj::Duration> all;
  for (const auto& [name, kept] : kept_) {
    const Grant* grant = leases_.admissible(name.first);
    const auto at = madeAt(kept, grant != nullptr && grant->holderKeeps);
    if (!at) continue;
    auto& oldest = all.try_emplace(name.first, 0 * kj::SECONDS).first->second;
    oldest = std::max(oldest, timer_.now() - *at);
  }
  return all;
}

std::string Keeper::restoredTimes(const Kept& kept) {
  if (kept.times == 0) return "";
  return "; restored " + std::to_string(kept.times) + (kept.times == 1 ? " time" : " times");
}

// Of a session that cannot go on from a checkpoint, and why there is none.
std::string Keeper::describeBeginning(const Kept& kept, const std::string& why) const {
  if (!kept.beginning) return "not protected: " + kept.who + ": " + why;
  if (!kept.log.obstacle.empty())
    return "not protected: " + kept.who + ": " + why + "; since its beginning: " + kept.log.obstacle;
  return "protected from its beginning: " + kept.who + ": " + why + callsTake(kept.log) + restoredTimes(kept);
}

std::map<Id, std::vector<std::string>> Keeper::say() const {
  std::map<Id, std::vector<std::string>> all;
  for (const auto& [name, kept] : kept_) {
    std::string text = "is ";
    const Grant* grant = leases_.admissible(name.first);
    const bool holderKeeps = grant != nullptr && grant->holderKeeps;
    if (restorer_.has(name))
      text += (kept.serverLost ? "being restored, since its server was lost: "
                               : "being restored, since its worker has died: ") +
              kept.who;
    else if (kept.pages == nullptr)
      text += describeBeginning(kept, kept.why.empty() ? "it has no checkpoint yet" : kept.why);
    else
      text += describe(kept, holderKeeps,
                       holderKeeps && !desk_.has(name.first) ? keeperOf(name.first) : std::string());
    all[name.first].push_back(std::move(text));
  }
  for (const auto& [id, grant] : leases_.all())
    if (grant.protectMs != 0 && !grant.closing && !all.contains(id))
      all[id].push_back("is not protected: none of its programs has a session");
  return all;
}

}  // namespace gpupool::server
