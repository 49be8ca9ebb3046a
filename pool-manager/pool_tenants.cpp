// Who is a tenant of the pool: whoever has tokens, a quota, leases or requests, or has used something that
// counts still. What each has now is put together here from where it is kept.
#include "pool-manager/pool.h"

namespace gpupool::pool {

std::vector<TenantUse> Pool::tenants(const Principal& who, const std::map<std::string, uint32_t>& tokens,
                                     uint64_t now) const {
  std::map<std::string, TenantUse> all;
  // Null: not for `who`; or nobody's, where no tokens are demanded, or each tenant's.
  const auto find = [&](const std::string& tenant) {
    const bool shown = !tenant.empty() && tenant != kEveryTenant && who.owns(tenant);
    return shown ? &all[tenant] : nullptr;
  };
  find(who.tenant);  // it is one, whatever it has
  for (const auto& [tenant, count] : tokens)
    if (TenantUse* use = find(tenant)) use->tokens = count;
  for (const auto& [tenant, quota] : quotas_.all()) find(tenant);
  for (const std::string& tenant : quotas_.tenants()) find(tenant);
  for (const auto& [id, record] : leases_) {
    TenantUse* use = find(record.tenant);
    if (use == nullptr) continue;
    ++use->leases[std::string(name(record.state))];
    use->claims += record.job.empty() ? 0 : 1;
  }
  for (const Waiter& waiter : waiters_) {
    const auto lease = waiter.resumes ? leases_.find(waiter.request.id) : leases_.end();
    TenantUse* use = find(lease == leases_.end() ? waiter.request.tenant : lease->second.tenant);
    if (use != nullptr) ++use->queued;
  }
  std::vector<TenantUse> list;
  for (auto& [tenant, use] : all) {
    use.quota = quotaUse(tenant);
    use.usage = usage_.deviceSeconds(tenant, now);
    list.push_back(std::move(use));
  }
  return list;
}

}  // namespace gpupool::pool
