#pragma once
// What the manager may ask of this server: grant, revoke, list sessions. Called on the connection the server
// made.

#include <string>

#include "server/front/leases.h"
#include "server/front/sessions.h"

namespace gpupool::server {

class Control final : public schema::ServerControl::Server, private kj::TaskSet::ErrorHandler {
 public:
  Control(LeaseTable& leases, SessionTable& sessions) : leases_(leases), sessions_(sessions), tasks_(*this) {}

 protected:
  kj::Promise<void> grant(GrantContext context) override;
  kj::Promise<void> revoke(RevokeContext context) override;
  kj::Promise<void> sessions(SessionsContext context) override;

 private:
  void taskFailed(kj::Exception&& exception) override;

  LeaseTable& leases_;
  SessionTable& sessions_;
  kj::TaskSet tasks_;
};

}  // namespace gpupool::server
