#include "pool-manager/rest/self.h"

namespace gpupool::pool::rest {
namespace {

// Those that something over REST needs. Their names are for programs, and stay what they are.
constexpr struct {
  Operation operation;
  const char* name;
} kOperations[] = {{Operation::look, "look"},
                   {Operation::seeQuotas, "see_quotas"},
                   {Operation::seeTenants, "see_tenants"},
                   {Operation::lease, "lease"},
                   {Operation::changeLease, "change_lease"},
                   {Operation::dropLost, "drop_lost"},
                   {Operation::cordon, "cordon"},
                   {Operation::setQuota, "set_quota"},
                   {Operation::tokens, "tokens"}};

}  // namespace

kj::Promise<Answer> showSelf(const Context& context, const Request& request) {
  Json operations = Json::array();
  for (const auto& [operation, text] : kOperations)
    if (may(request.who, operation)) operations.push_back(text);
  const bool all = request.who.role == Role::admin || request.who.role == Role::scheduler;
  return Answer{200,
                {{"role", name(request.who.role)},
                 {"tenant", request.who.tenant},
                 {"tokens", context.service.tokens().demanded()},
                 {"allTenants", all},
                 {"may", std::move(operations)}}};
}

}  // namespace gpupool::pool::rest
