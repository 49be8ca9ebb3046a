// gpupool quota: how much of the pool each tenant may have, and has.

#include <charconv>
#include <cmath>
#include <iostream>

#include "pool-manager/cli/holder.h"
#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/output.h"
#include "pool-manager/cli/places.h"
#include "pool-manager/cli/table.h"
#include "pool-manager/listing_json.h"

namespace gpupool::cli {
namespace {

using pool::Quota;
using pool::QuotaUse;

constexpr unsigned kStorePatienceMs = 10'000;
const char* const kEnvironment = "GPUPOOL_STATE: the folder of this machine's pool.";
const char* const kStatus =
    "0: done. 1: the manager refuses, or none is reachable. 2: the command line is wrong.";

const Help kSetHelp = {
    "gpupool quota set [options] TENANT",
    "Says how much of the pool a tenant may have, and whether its leases are protected; what is not named is "
    "not "
    "limited. It replaces the quota "
    "that "
    "the tenant has. The tenant '*' stands for each that has none of its own. A request that is beyond the "
    "quota for good is refused at once; one that fits when leases of the tenant have ended waits for that, "
    "with --wait. Leases that run are left alone. Only the pool's operator can.",
    kEnvironment, kStatus,
    "  gpupool quota set --devices 2 --memory 160GiB --device-hours 500 --per month alice\n"
    "  gpupool quota set --protect 30s '*'\n"
    "  gpupool quota set --none alice\n"};
const Help kListHelp = {
    "gpupool quota list [options]",
    "Lists the tenants' quotas and what they have of them: the pool's operator and schedulers see all, "
    "others "
    "their own. Half a GPU's memory is half a GPU. Of a suspended lease, what is on its GPUs counts.",
    kEnvironment, kStatus, "  gpupool quota list -o wide\n"};
const Help kQuotaHelp = {"gpupool quota set|list [options] ...",
                         "Quotas: how much of the pool a tenant may have. Both have --help.", kEnvironment,
                         kStatus, "  gpupool quota set --devices 2 alice\n  gpupool quota list\n"};

// In `unit`ths.
uint64_t decimal(const std::string& option, const std::string& text, double unit) {
  double value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || !(value > 0 && value <= 1e9))
    throw options::OptionError("--" + option + ": '" + text + "' is no number above 0 (example: 2, or 0.5)");
  return std::max<uint64_t>(1, static_cast<uint64_t>(std::llround(value * unit)));
}

std::string number(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f", value);
  return text;
}

std::string of(const std::string& used, const std::string& most, bool limited) {
  return used + (limited ? " of " + most : "");
}

void printQuotas(const std::vector<QuotaUse>& uses, bool wide) {
  std::vector<std::vector<std::string>> rows = {{"TENANT"}};
  const auto heading = quotaHeading();
  rows[0].insert(rows[0].end(), heading.begin(), heading.end());
  if (wide) rows[0].insert(rows[0].end(), {"BEGINS AGAIN", "PROTECT"});
  for (const QuotaUse& use : uses) {
    auto& row = rows.emplace_back(std::vector<std::string>{use.quota.tenant});
    for (std::string& cell : quotaCells(use)) row.push_back(std::move(cell));
    if (wide) row.insert(row.end(), {pool::utcText(use.windowEndsS), protectCell(use)});
  }
  printTable(rows);
}

int set(const Words& words) {
  ClientOptions client;
  std::string devices, hours, per = "month";
  options::Bytes memory;
  bool none = false;
  std::chrono::milliseconds protect{0};
  const Parsed parsed = parseCommand(
      words, kSetHelp, &client, kAskingOptions,
      {{"devices", devices, "N", "So many GPUs at once; a part of a GPU's memory is that part of a GPU.",
        true},
       {"memory", memory, "SIZE", "So much memory of GPUs at once: 160GiB.", true},
       {"device-hours", hours, "N", "So many GPU-hours in each --per: one GPU for an hour is one.", true},
       {"per", per, "day|week|month", "Of the calendar, in UTC; weeks begin on Monday.", true},
       {"protect", protect, "TIME",
        "No limit: the tenant's leases that name nothing else are protected as `gpupool run --protect=TIME` "
        "does it. "
        "--no-protect of `gpupool run`, and protect: false in client.yaml, count more. 0: they are not.",
        true},
       {"none", none, "", "Take the tenant's quota away.", true}});
  if (parsed.helped) return 0;
  if (parsed.rest.size() != 1 || parsed.rest[0].empty())
    throw options::OptionError("quota set takes one tenant, behind the options");
  Quota quota{parsed.rest[0]};
  if (!devices.empty()) quota.milliDevices = decimal("devices", devices, 1000);
  if (!hours.empty()) quota.deviceSeconds = decimal("device-hours", hours, 3600);
  quota.memoryBytes = memory.value;
  if (protect > std::chrono::milliseconds(pool::kMostProtectMs))
    throw options::OptionError("--protect: at most 24h");
  quota.protectMs = static_cast<uint32_t>(protect.count());
  if (none != quota.none())
    throw options::OptionError(
        none ? "--none goes with no other limit"
             : "what is it? --devices, --memory, --device-hours or --protect; or --none");
  const auto window = pool::windowOf(per);
  if (!window) throw options::OptionError("--per: '" + per + "' is not day, week or month");
  quota.window = *window;
  ManagerQuery(client, kStorePatienceMs).setQuota(quota, userAndHost());
  std::cout << "gpupool: tenant " << quota.tenant << " may have " << pool::describe(quota) << '\n';
  return 0;
}

int list(const Words& words) {
  return listAs(
      words, kListHelp, kAskingOptions,
      [](const ClientOptions& client) { return ManagerQuery(client, kStorePatienceMs).quotas(); },
      printQuotas, [](const QuotaUse& use) { return toJson(use); });
}

}  // namespace

std::vector<std::string> quotaHeading() { return {"GPUS", "MEMORY", "GPU-HOURS", "PER"}; }

std::vector<std::string> quotaCells(const QuotaUse& use) {
  const Quota& quota = use.quota;
  const auto devices = [](uint64_t milli) { return number(static_cast<double>(milli) / 1000); };
  const auto hours = [](uint64_t seconds) { return hoursText(static_cast<double>(seconds)); };
  return {of(devices(use.milliDevices), devices(quota.milliDevices), quota.milliDevices != 0),
          of(options::formatSize(use.memoryBytes), options::formatSize(quota.memoryBytes),
             quota.memoryBytes != 0),
          of(hours(use.deviceSeconds), hours(quota.deviceSeconds), quota.deviceSeconds != 0),
          name(quota.window)};
}

std::string protectCell(const QuotaUse& use) {
  return use.quota.protectMs == 0 ? "-" : options::formatTime(std::chrono::milliseconds(use.quota.protectMs));
}

std::string hoursText(double deviceSeconds) { return number(deviceSeconds / 3600); }

int runQuota(const Words& words) {
  const std::string verb = words.empty() ? "" : words[0];
  const Words rest(words.begin() + (words.empty() ? 0 : 1), words.end());
  if (verb == "set") return set(rest);
  if (verb == "list") return list(rest);
  if (parseCommand(words, kQuotaHelp, nullptr, {}, {}).helped) return 0;
  throw options::OptionError("quota takes set or list; --help describes them");
}

}  // namespace gpupool::cli
