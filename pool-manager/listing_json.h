#pragma once
// What the manager lists, as JSON: the same for `gpupool devices|servers|leases|explain|audit|quota|tenants
// --json` and for REST (docs/rest.md). Names come from other machines and may be any bytes: dump() writes
// valid JSON all the same.

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "pool-manager/audit.h"
#include "pool-manager/listing.h"
#include "pool-manager/tenants.h"

namespace gpupool::pool {

nlohmann::json toJson(const Lease& lease);
nlohmann::json toJson(const ListedServer& server);
nlohmann::json toJson(const ListedDevice& device, const PoolView& view);
nlohmann::json toJson(const Explanation& explanation);
nlohmann::json toJson(const AuditEntry& entry);
nlohmann::json toJson(const Quota& quota);
nlohmann::json toJson(const QuotaUse& use);
nlohmann::json toJson(const TenantUse& use);

std::string guidText(uint64_t guid);                 // "b83f:d203:0011:2233", as ibv_devinfo has it
std::string gidText(const fabric::GidValue& value);  // as an IPv6 address

// indent: spaces; negative: one line.
std::string dump(const nlohmann::json& value, int indent);

}  // namespace gpupool::pool
