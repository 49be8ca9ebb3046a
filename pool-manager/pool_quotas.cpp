// Quotas: what tenants have, and why a request is beyond what its tenant may have.
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "base/tokens.h"
#include "pool-manager/pool.h"
#include "pool-manager/roles.h"

namespace gpupool::pool {
namespace {

constexpr uint64_t kMostMilliDevices = 1'000'000'000;
constexpr uint64_t kMostDeviceSeconds = uint64_t{1'000'000} * 366 * 86'400;

Held heldBy(uint64_t bytes, const Device& device) {
  return {static_cast<double>(bytes) / static_cast<double>(std::max<uint64_t>(1, device.memoryBytes)), bytes};
}

// What counts is what was asked for, and not what a lease takes besides for its context and code.
uint64_t countedBytes(const Claim& claim) {
  const uint64_t asked = std::min(claim.device.memoryBytes, claim.device.info.memoryBytes);
  return claim.suspended ? std::min(asked, suspendedBytes(claim.device, claim.kept)) : asked;
}

// What the lease has on devices; whole: what it would have if it were not suspended.
Held heldBy(const LeaseRecord& record, bool whole) {
  Held held;
  for (const Placement& placement : record.placements)
    for (size_t i = 0; i < placement.devices.size(); ++i) {
      const Claim claim = claimOf(record, placement, i, whole);
      held += heldBy(countedBytes(claim), claim.device.info);
    }
  if (whole && record.state == LeaseState::held)
    for (const LeasedDevice& device : record.hold->was.devices)
      held += heldBy(countedBytes({device}), device.info);
  return held;
}

double secondsOf(const LeaseRequest& request, double devices) {
  return devices * static_cast<double>(request.limitMs) / 1000;
}

uint64_t toMilli(double devices) { return static_cast<uint64_t>(std::llround(devices * 1000)); }

}  // namespace

// A lost lease has nothing that its tenant could use, or give back.
Held Pool::held(const std::string& tenant) const {
  Held all;
  for (const Id& id : leases_.of(tenant))
    if (const LeaseRecord& record = leases_.all().at(id); record.state != LeaseState::lost)
      all += heldBy(record, false);
  return all;
}

const Held& Pool::held(const std::string& tenant, HeldCounts& counted) const {
  const auto [at, isNew] = counted.try_emplace(tenant);
  if (isNew) at->second = held(tenant);
  return at->second;
}

// Of what it has, since that was charged last.
void Pool::charge(LeaseRecord& record, uint64_t now) {
  const double seconds = static_cast<double>(now - std::min(now, record.chargedMs)) / 1000;
  record.chargedMs = now;
  const double deviceSeconds = heldBy(record, false).devices * seconds;
  if (record.state == LeaseState::lost || deviceSeconds == 0) return;
  usage_.charge(record.tenant, deviceSeconds, now);
  quotas_.charge(record.tenant, deviceSeconds, events_.calendarMs() / 1000);
}

// By the least that the request could take: on the devices that fit it, whatever is free.
std::string Pool::neverByQuota(const LeaseRequest& request, const Wish& wish,
                               const std::vector<ServerUse>& servers) const {
  if (quotas_.of(request.tenant) == nullptr) return "";
  Held least{std::numeric_limits<double>::infinity(), std::numeric_limits<uint64_t>::max()};
  for (const ServerUse& server : servers)
    for (const DeviceUse& device : server.devices) {
      if ((!wish.server.empty() && wish.server != server.name) || !wish.gpu.matches(device.info)) continue;
      const Held one =
          heldBy(wish.memoryBytes == 0 ? device.info.memoryBytes : wish.memoryBytes, device.info);
      least.devices = std::min(least.devices, one.devices);
      least.bytes = std::min(least.bytes, one.bytes);
    }
  if (!std::isfinite(least.devices)) return "";  // no server is there yet that has such a device
  Held wanted{least.devices * wish.deviceCount, least.bytes * wish.deviceCount};
  wanted.seconds = secondsOf(request, wanted.devices);
  return quotas_.never(request.tenant, wanted);
}

// choice: what it would get now. Where that is nothing, only what its tenant has used already counts.
Quotas::Hindrance Pool::quotaHinders(const LeaseRequest& request, const Choice& choice,
                                     HeldCounts& counted) const {
  if (quotas_.of(request.tenant) == nullptr) return {};
  Held wanted;
  for (const LeasedDevice& device : choice.devices) wanted += heldBy(countedBytes({device}), device.info);
  if (choice.devices.empty() && request.memoryBytes == 0) wanted.devices = request.deviceCount;
  if (choice.devices.empty()) wanted.bytes = request.memoryBytes * request.deviceCount;
  wanted.seconds = secondsOf(request, wanted.devices);
  return quotas_.hinders(request.tenant, held(request.tenant, counted), wanted, events_.calendarMs() / 1000);
}

// It has had its grant: what its tenant has used counts no more.
std::string Pool::quotaHindersResume(const LeaseRecord& record, const Queue& before) const {
  if (quotas_.of(record.tenant) == nullptr) return "";
  const Held whole = heldBy(record, true), now = heldBy(record, false);
  // Smaller than the lease, after it was lowered: the end of others does not help.
  if (const std::string never = quotas_.never(record.tenant, whole); !never.empty())
    return never + ": its quota has to grow first";
  const Held wanted{whole.devices - now.devices, whole.bytes - now.bytes};
  return quotas_.hindersAtOnce(record.tenant, held(record.tenant, before.held), wanted);
}

// It claims nothing meanwhile: those behind it need not wait for its tenant. True: it has been answered.
bool Pool::waitForQuota(const Waiter& waiter, const Quotas::Hindrance& hindrance, uint64_t now) {
  const uint64_t leftMs = waiter.untilMs - std::min(waiter.untilMs, now);
  const bool hopeless = hindrance.untilS != 0 && events_.calendarMs() + leftMs < hindrance.untilS * 1000;
  if (!hopeless && !tooLate(waiter, now)) return false;
  fail(waiter, {hopeless ? Failure::Kind::refused : Failure::Kind::noDevice, hindrance.text});
  return true;
}

void Pool::setQuota(const Principal& who, const Quota& quota, const std::string& by, Journal::Done done) {
  if (const std::string why = refusalOf(who, Operation::setQuota); !why.empty())
    throw std::invalid_argument(why);
  if (!isTenantName(quota.tenant))
    throw std::invalid_argument("a tenant's name has 1 to 64 ASCII characters, without spaces");
  if (quota.window > QuotaWindow::month)
    throw std::invalid_argument("a quota's hours are of a day, week or month");
  if (quota.milliDevices > kMostMilliDevices || quota.deviceSeconds > kMostDeviceSeconds)
    throw std::invalid_argument("a quota has at most a million GPUs, each for a year");
  if (quota.protectMs != 0 && (quota.protectMs < kLeastProtectMs || quota.protectMs > kMostProtectMs))
    throw std::invalid_argument(
        "a tenant's leases are checkpointed once a second at most, and once a day at least");
  if (quotas_.all().size() >= kMostQuotas && !quotas_.all().contains(quota.tenant))
    throw std::invalid_argument("there are too many quotas: take some away");
  AuditEntry entry;
  entry.event = AuditEvent::quotaSet;
  entry.tenant = quota.tenant;
  entry.by = who.saying(by);
  entry.reason = describe(quota);
  write({Quotas::writeOf(quota)}, {entry}, [this, quota, done = std::move(done)](const std::string& why) {
    if (why.empty()) quotas_.set(quota);
    done(why);
  });
}

std::vector<QuotaUse> Pool::quotas(const Principal& who) const {
  const bool all = who.role == Role::admin || who.role == Role::scheduler;
  std::set<std::string> tenants;
  for (const auto& [tenant, quota] : quotas_.all()) tenants.insert(tenant);
  for (const std::string& tenant : quotas_.tenants()) tenants.insert(tenant);
  for (const auto& [id, record] : leases_)
    if (!record.tenant.empty() && record.state != LeaseState::lost) tenants.insert(record.tenant);
  if (!all) tenants = {who.tenant};
  std::vector<QuotaUse> uses;
  for (const std::string& tenant : tenants)
    if (tenant != kEveryTenant || quotas_.of(tenant) != nullptr) uses.push_back(quotaUse(tenant));
  return uses;
}

QuotaUse Pool::quotaUse(const std::string& tenant) const {
  const uint64_t nowS = events_.calendarMs() / 1000;
  QuotaUse use;
  if (const Quota* quota = quotas_.of(tenant)) use.quota = *quota;
  use.quota.tenant = tenant;
  const Held has = held(tenant);
  use.milliDevices = toMilli(has.devices);
  use.memoryBytes = has.bytes;
  use.deviceSeconds = static_cast<uint64_t>(quotas_.used(tenant, use.quota.window, nowS));
  use.windowEndsS = windowAt(use.quota.window, nowS).endS;
  return use;
}

}  // namespace gpupool::pool
