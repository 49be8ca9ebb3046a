#include "pool-manager/quotas.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ctime>

#include "base/options.h"
#include "pool-manager/model.h"

namespace gpupool::pool {
namespace {

constexpr uint64_t kDayS = 86'400;
constexpr double kLittle = 1e-6;  // of a device: fractions do not add up exactly

// At most two decimals, and only those that say something.
std::string number(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f", value);
  std::string out = text;
  while (out.back() == '0') out.pop_back();
  if (out.back() == '.') out.pop_back();
  return out;
}

std::string gpus(double devices) { return number(devices) + (devices == 1 ? " GPU" : " GPUs"); }
// Less than one GiB in smaller units: a quota of 1 MiB is not 0 GiB.
std::string gib(uint64_t bytes) {
  constexpr uint64_t kGiB = uint64_t{1} << 30;
  if (bytes != 0 && bytes < kGiB) return options::formatSize(bytes);
  return number(static_cast<double>(bytes) / kGiB) + " GiB";
}
std::string hours(double seconds) { return number(seconds / 3600); }
double devicesOf(const Quota& quota) { return static_cast<double>(quota.milliDevices) / 1000; }

std::string tenantMay(const std::string& tenant) { return "tenant '" + tenant + "' may have "; }

}  // namespace

const char* name(QuotaWindow window) {
  constexpr const char* kNames[kQuotaWindows] = {"day", "week", "month"};
  return window <= QuotaWindow::month ? kNames[static_cast<uint32_t>(window)] : "unknown";
}

std::optional<QuotaWindow> windowOf(const std::string& text) {
  for (unsigned i = 0; i < kQuotaWindows; ++i)
    if (text == name(static_cast<QuotaWindow>(i))) return static_cast<QuotaWindow>(i);
  return std::nullopt;
}

std::string describe(const Quota& quota) {
  std::string text;
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (quota.milliDevices != 0) add(gpus(devicesOf(quota)));
  if (quota.memoryBytes != 0) add(gib(quota.memoryBytes));
  if (quota.deviceSeconds != 0)
    add(hours(static_cast<double>(quota.deviceSeconds)) + " GPU-hours a " + name(quota.window));
  if (text.empty()) text = "as much as there is";
  if (quota.protectMs == 0) return text;
  return text + "; its leases are protected, every " +
         options::formatTime(std::chrono::milliseconds(quota.protectMs));
}

WindowTimes windowAt(QuotaWindow window, uint64_t nowS) {
  const uint64_t day = nowS - nowS % kDayS;
  if (window == QuotaWindow::day) return {day, day + kDayS};
  const auto time = static_cast<std::time_t>(nowS);
  std::tm utc{};
  gmtime_r(&time, &utc);
  if (window == QuotaWindow::week) {
    const uint64_t since = static_cast<uint64_t>((utc.tm_wday + 6) % 7) * kDayS;
    const uint64_t begin = day - std::min(day, since);
    return {begin, begin + 7 * kDayS};
  }
  utc.tm_hour = utc.tm_min = utc.tm_sec = 0;
  utc.tm_mday = 1;
  const auto begin = static_cast<uint64_t>(timegm(&utc));
  ++utc.tm_mon;  // timegm carries over into the next year
  return {begin, static_cast<uint64_t>(timegm(&utc))};
}

void Quotas::load(const std::vector<Entry>& quotas, const std::vector<Entry>& hours) {
  for (const Entry& entry : quotas) {
    Quota quota{entry.key.substr(kQuotaPrefix.size())};
    unsigned long long devices = 0, bytes = 0, seconds = 0;
    unsigned window = 0, protect = 0;  // an earlier manager's has no protection
    if (std::sscanf(entry.value.c_str(), "%llu %llu %llu %u %u", &devices, &bytes, &seconds, &window,
                    &protect) < 4)
      continue;
    if (window >= kQuotaWindows) continue;
    quota.milliDevices = devices, quota.memoryBytes = bytes, quota.deviceSeconds = seconds;
    quota.window = static_cast<QuotaWindow>(window);
    quota.protectMs = protect;
    set(quota);
  }
  for (const Entry& entry : hours) {
    Account account;
    unsigned long long begins[kQuotaWindows] = {};
    double counts[kQuotaWindows] = {};
    if (std::sscanf(entry.value.c_str(), "%llu %lf %llu %lf %llu %lf", &begins[0], &counts[0], &begins[1],
                    &counts[1], &begins[2], &counts[2]) != 6)
      continue;
    for (unsigned i = 0; i < kQuotaWindows; ++i)
      if (std::isfinite(counts[i]) && counts[i] >= 0) account.counts[i] = {begins[i], counts[i]};
    accounts_[entry.key.substr(kHoursPrefix.size())] = account;
  }
}

const Quota* Quotas::of(const std::string& tenant) const {
  if (tenant.empty()) return nullptr;
  auto at = quotas_.find(tenant);
  if (at == quotas_.end()) at = quotas_.find(kEveryTenant);
  return at == quotas_.end() ? nullptr : &at->second;
}

void Quotas::set(const Quota& quota) {
  if (quota.none())
    quotas_.erase(quota.tenant);
  else
    quotas_[quota.tenant] = quota;
}

Write Quotas::writeOf(const Quota& quota) {
  const std::string key = kQuotaPrefix + quota.tenant;
  if (quota.none()) return {key, std::nullopt};
  return {key, std::to_string(quota.milliDevices) + " " + std::to_string(quota.memoryBytes) + " " +
                   std::to_string(quota.deviceSeconds) + " " +
                   std::to_string(static_cast<uint32_t>(quota.window)) + " " +
                   std::to_string(quota.protectMs)};
}

void Quotas::charge(const std::string& tenant, double deviceSeconds, uint64_t nowS) {
  if (tenant.empty() || deviceSeconds <= 0) return;
  Account& account = accounts_[tenant];
  account.changed = true;
  for (unsigned i = 0; i < kQuotaWindows; ++i) {
    Count& count = account.counts[i];
    const uint64_t beginS = windowAt(static_cast<QuotaWindow>(i), nowS).beginS;
    if (count.beginS != beginS) count = {beginS, 0};
    count.seconds += deviceSeconds;
  }
}

double Quotas::used(const std::string& tenant, QuotaWindow window, uint64_t nowS) const {
  const auto at = accounts_.find(tenant);
  if (at == accounts_.end()) return 0;
  const Count& count = at->second.counts.at(static_cast<size_t>(window));
  return count.beginS == windowAt(window, nowS).beginS ? count.seconds : 0;
}

std::vector<std::string> Quotas::tenants() const {
  std::vector<std::string> names;
  names.reserve(accounts_.size());
  for (const auto& [tenant, account] : accounts_) names.push_back(tenant);
  return names;
}

std::vector<Write> Quotas::changes(uint64_t nowS) {
  std::vector<Write> writes;
  const uint64_t weekS = windowAt(QuotaWindow::week, nowS).beginS,
                 monthS = windowAt(QuotaWindow::month, nowS).beginS;
  for (auto at = accounts_.begin(); at != accounts_.end();) {
    auto& [tenant, account] = *at;
    const bool over = account.counts[1].beginS != weekS && account.counts[2].beginS != monthS;
    std::string text;
    for (const Count& count : account.counts)
      text += (text.empty() ? "" : " ") + std::to_string(count.beginS) + " " + std::to_string(count.seconds);
    if (over)
      writes.push_back({kHoursPrefix + tenant, std::nullopt});
    else if (account.changed)
      writes.push_back({kHoursPrefix + tenant, text});
    account.changed = false;
    at = over ? accounts_.erase(at) : std::next(at);
  }
  return writes;
}

std::string Quotas::never(const std::string& tenant, const Held& wanted) const {
  const Quota* quota = of(tenant);
  if (quota == nullptr) return "";
  if (quota->milliDevices != 0 && wanted.devices > devicesOf(*quota) + kLittle)
    return tenantMay(tenant) + gpus(devicesOf(*quota)) + " at once, and " + number(wanted.devices) +
           (wanted.devices == 1 ? " is wanted" : " are wanted");
  if (quota->memoryBytes != 0 && wanted.bytes > quota->memoryBytes)
    return tenantMay(tenant) + gib(quota->memoryBytes) + " of GPUs' memory at once, and " +
           gib(wanted.bytes) + " are wanted";
  if (quota->deviceSeconds != 0 && wanted.seconds > static_cast<double>(quota->deviceSeconds) + kLittle)
    return tenantMay(tenant) + hours(static_cast<double>(quota->deviceSeconds)) + " GPU-hours a " +
           name(quota->window) + ", and " + hours(wanted.seconds) + " are wanted";
  return "";
}

Quotas::Hindrance Quotas::hinders(const std::string& tenant, const Held& has, const Held& wanted,
                                  uint64_t nowS) const {
  const Quota* quota = of(tenant);
  if (quota == nullptr) return {};
  if (quota->deviceSeconds != 0) {
    const auto most = static_cast<double>(quota->deviceSeconds);
    const double had = used(tenant, quota->window, nowS);
    const uint64_t endS = windowAt(quota->window, nowS).endS;
    if (had >= most || had + wanted.seconds > most + kLittle)
      return {tenantMay(tenant) + hours(most) + " GPU-hours a " + name(quota->window) + ", and has had " +
                  hours(had) + (had >= most ? "" : "; " + hours(wanted.seconds) + " more are wanted") +
                  ". The next " + name(quota->window) + " begins on " + utcText(endS),
              endS};
  }
  return {hindersAtOnce(tenant, has, wanted)};
}

std::string Quotas::hindersAtOnce(const std::string& tenant, const Held& has, const Held& wanted) const {
  const Quota* quota = of(tenant);
  if (quota == nullptr) return "";
  if (quota->milliDevices != 0 && has.devices + wanted.devices > devicesOf(*quota) + kLittle)
    return tenantMay(tenant) + gpus(devicesOf(*quota)) + " at once, and has " + number(has.devices) + "; " +
           number(wanted.devices) + " more " + (wanted.devices == 1 ? "is" : "are") +
           " wanted: leases of its own have to end first";
  if (quota->memoryBytes != 0 &&
      (has.bytes > quota->memoryBytes || wanted.bytes > quota->memoryBytes - has.bytes))
    return tenantMay(tenant) + gib(quota->memoryBytes) + " of GPUs' memory at once, and has " +
           gib(has.bytes) + "; " + gib(wanted.bytes) +
           " more are wanted: leases of its own have to end first";
  return "";
}

}  // namespace gpupool::pool
