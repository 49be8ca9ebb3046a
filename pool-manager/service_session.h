#pragma once
// One connection's Manager: what whoever is at its other end may ask, and how the pool is asked. Part of the
// service's implementation.

#include "pool-manager/service.h"

namespace gpupool::pool {

// What an RPC system lets go of, it lets go of later: a session may outlive the service.
struct Service::Tie : kj::Refcounted {
  explicit Tie(Service* service) : service(service) {}
  Service* service;
};

class Service::Session final : public schema::Manager::Server {
 public:
  // login: null where everything is allowed. peer: the other end's process, if it is on this machine; else 0.
  // open: see Principal.
  Session(kj::Own<Tie> tie, std::shared_ptr<Login> login, int peer, bool open)
      : tie_(kj::mv(tie)), login_(std::move(login)), peer_(peer), open_(open) {}
  // Of somebody who has proven already who he is.
  Session(kj::Own<Tie> tie, Principal known) : tie_(kj::mv(tie)), known_(std::move(known)) {}
  ~Session() noexcept(false) {
    if (tie_->service != nullptr) tie_->service->closed(*this);
  }

 protected:
  kj::Promise<void> login(LoginContext context) override;
  kj::Promise<void> prove(ProveContext context) override;
  kj::Promise<void> join(JoinContext context) override;
  kj::Promise<void> beat(BeatContext context) override;
  kj::Promise<void> leave(LeaveContext context) override;
  kj::Promise<void> lease(LeaseContext context) override;
  kj::Promise<void> renew(RenewContext context) override;
  kj::Promise<void> release(ReleaseContext context) override;
  kj::Promise<void> cordon(CordonContext context) override;
  kj::Promise<void> drain(DrainContext context) override;
  kj::Promise<void> drainState(DrainStateContext context) override;
  kj::Promise<void> stopDrain(StopDrainContext context) override;
  kj::Promise<void> suspend(SuspendContext context) override;
  kj::Promise<void> resume(ResumeContext context) override;
  kj::Promise<void> migrate(MigrateContext context) override;
  kj::Promise<void> checkpoint(CheckpointContext context) override;
  kj::Promise<void> failOver(FailOverContext context) override;
  kj::Promise<void> places(PlacesContext context) override;
  kj::Promise<void> explain(ExplainContext context) override;
  kj::Promise<void> audit(AuditContext context) override;
  kj::Promise<void> devices(DevicesContext context) override;
  kj::Promise<void> servers(ServersContext context) override;
  kj::Promise<void> administration(AdministrationContext context) override;
  kj::Promise<void> leases(LeasesContext context) override;

 private:
  void fill(schema::DeviceState::Builder out, const ServerUse& server, const DeviceUse& device);
  static void tell(const Cordon& cordon, schema::ServerState::Builder out);
  void demand(Operation operation);
  Principal principal() const;
  Service& service();

  kj::Own<Tie> tie_;
  std::shared_ptr<Login> login_;
  std::optional<Principal> known_;
  int peer_ = 0;
  bool open_ = false;
};

}  // namespace gpupool::pool
