// gpupool tenants: who is a tenant of the pool, what each may have of it, and has.

#include <cstdio>

#include "pool-manager/cli/manager_query.h"
#include "pool-manager/cli/output.h"
#include "pool-manager/cli/table.h"
#include "pool-manager/listing_json.h"

namespace gpupool::cli {
namespace {

using pool::TenantUse;

constexpr unsigned kPatienceMs = 10'000;

const Help kTenantsHelp = {
    "gpupool tenants [options]",
    "Lists the tenants: whoever has tokens, a quota, leases or requests in the queue, or has used GPUs in "
    "this "
    "day, week or month. Of each it shows how many valid tokens and leases it has, how many of its requests "
    "wait, and what it has of its quota (see `gpupool quota list`). The pool's operator and schedulers see "
    "all, "
    "others their own.",
    "GPUPOOL_STATE: the folder of this machine's pool.",
    "0: done. 1: the manager refuses, or none is reachable. 2: the command line is wrong.",
    "  gpupool tenants\n  gpupool tenants -o wide\n  gpupool tenants -o json | jq '.[] | select(.queued > "
    "0)'\n"};

// "2 active, 1 held"
std::string states(const TenantUse& use) {
  std::string text;
  for (const auto& [state, count] : use.leases)
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + state;
  return text.empty() ? "-" : text;
}

uint32_t leases(const TenantUse& use) {
  uint32_t sum = 0;
  for (const auto& [state, count] : use.leases) sum += count;
  return sum;
}

void printTenants(const std::vector<TenantUse>& tenants, bool wide) {
  std::vector<std::vector<std::string>> rows = {{"TENANT", "TOKENS", "LEASES", "QUEUED"}};
  const auto quota = quotaHeading();
  rows[0].insert(rows[0].end(), quota.begin(), quota.end());
  if (wide) rows[0].insert(rows[0].end(), {"CLAIMS", "USAGE", "PROTECT", "STATES"});
  for (const TenantUse& use : tenants) {
    auto& row =
        rows.emplace_back(std::vector<std::string>{use.quota.quota.tenant, std::to_string(use.tokens),
                                                   std::to_string(leases(use)), std::to_string(use.queued)});
    for (std::string& cell : quotaCells(use.quota)) row.push_back(std::move(cell));
    if (wide)
      row.insert(row.end(),
                 {std::to_string(use.claims), hoursText(use.usage), protectCell(use.quota), states(use)});
  }
  printTable(rows);
}

}  // namespace

int runTenants(const Words& words) {
  return listAs(
      words, kTenantsHelp, kAskingOptions,
      [](const ClientOptions& client) { return ManagerQuery(client, kPatienceMs).tenants(); }, printTenants,
      [](const TenantUse& use) { return toJson(use); });
}

}  // namespace gpupool::cli
