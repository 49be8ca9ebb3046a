#pragma once
// The manager on the network: Cap'n Proto RPC over TCP and a Unix socket, all on one KJ event loop, in front
// of a Pool.
//
// Every connection gets a Manager object of its own, so that the end of a connection is the end of the server
// that joined over it. Everything runs on the loop's thread.

#include <kj/async-io.h>

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "pool-manager/answers.h"
#include "pool-manager/awake_clock.h"
#include "pool-manager/counters.h"
#include "pool-manager/drains.h"
#include "pool-manager/login.h"
#include "pool-manager/peer_count.h"
#include "pool-manager/pool.h"
#include "pool-manager/tls_door.h"
#include "schema/pool.capnp.h"
#include "schema/protocol.h"

namespace gpupool::pool {

struct ServiceLimits {
  kj::Duration call = 5 * kj::SECONDS;  // an order to a server is answered within this
  kj::Duration tick = 100 * kj::MILLISECONDS;
  uint32_t mostStepMs = 500;              // a longer gap between two looks at the clock counts as this much
  kj::Duration login = 10 * kj::SECONDS;  // a login must be finished within this
  size_t connections = 512;               // of one host, or of one user of the Unix socket, at once
  bool anyUser = false;                   // Unix socket: else only this process's user, and root
  bool plainFromLoopback = true;          // see TlsDoor
};

class Service final : private PoolEvents, private kj::TaskSet::ErrorHandler {
 public:
  // now: CLOCK_BOOTTIME in milliseconds, or a test's clock. The pool sees it through an AwakeClock.
  Service(kj::Timer& timer, Store& store, const PoolTimes& times, const ServiceLimits& limits,
          std::function<uint64_t()> now);

  ~Service() noexcept override;

  // Serves a listener until the service is destroyed. `local`: a Unix socket, whose peers' user is checked.
  void serve(kj::Own<kj::ConnectionReceiver> listener, bool local);
  // From now on every connection must prove one of these tokens first, except those of this process's user
  // and of root on a Unix socket. Peers that use wrong tokens are slowed down. Called at every login; a
  // connection that has proven a token keeps its rights.
  // The same is so, without a file, once the store has had a token.
  void demandTokens(std::function<const Tokens&()> tokens) { tokens_.useFile(std::move(tokens)); }
  // From now on connections over TCP have TLS with this certificate, which outlives the service.
  void demandTls(tls::Certificate& certificate);
  // As docs/tenants.md says, tokens do not cross a network without TLS. Called where tokens are made; throws
  // with what to do instead.
  void guardTokensBy(std::function<void()> guard) { guardTokens_ = std::move(guard); }
  void guardTokens() const { guardTokens_(); }
  // The certificates that those who connect are to know; see Administration.createToken.
  std::vector<Fingerprint> certificates() const;
  // One connection that came in. trusted: it is of this process's user or of root, and nothing needs to be
  // proven. peer: who is slowed down. process: at its other end, 0: unknown. certificate: as in Login.
  void accept(kj::Own<kj::AsyncIoStream> stream, bool trusted, const std::string& peer, int process,
              const std::optional<Fingerprint>& certificate = {});
  // Expiry and other housekeeping. Resolves only by failing: when another manager has taken over the store.
  kj::Promise<void> run();

  Pool& pool() { return pool_; }
  const Counters& counters() const { return counters_; }
  uint64_t now() { return clock_.now(); }  // on the pool's clock

  // --- for those who serve the pool by other means than RPC (rest/), on this loop
  // Serves a listener as above, but gives its connections to `accept`, with accept()'s arguments.
  using Accept = std::function<void(kj::Own<kj::AsyncIoStream>, bool trusted, const std::string& peer)>;
  void serve(kj::Own<kj::ConnectionReceiver> listener, bool local, Accept accept);
  // What a connection that belongs to `who` is offered.
  schema::Manager::Client managerFor(const Principal& who);
  // Of all connections of a host, however they are served; wrong tokens of a host; none: see demandTokens.
  PeerCount& connections() { return connections_; }
  FailureLimit& failures() { return failures_; }
  TokenBook& tokens() { return tokens_; }
  // Ends, soon, the connections that have proven this token; those that have proven nothing.
  void endConnections(const std::string& token);
  void endOpenConnections();

 private:
  class Session;  // one connection's Manager
  struct Connection;
  struct Tie;
  // A connection that has to end when its token does.
  struct Live {
    std::shared_ptr<Login> login;  // null: it has proven nothing
    kj::Own<kj::PromiseFulfiller<void>> end;
  };
  struct Controlled {
    Id incarnation;
    Session* session;
    schema::ServerControl::Client control;
  };

  kj::Promise<void> acceptLoop(kj::ConnectionReceiver& listener, bool local, Accept other);
  void acceptPeer(kj::AuthenticatedStream peer, bool local, const Accept& other);
  kj::Promise<void> enter(kj::Own<kj::AsyncIoStream> stream, const std::string& peer, Accept other);
  void closed(Session& session);
  [[noreturn]] void refuseVersion(const schema::ProtocolRange& theirs);
  // Asks the pool, whose answer comes now or later. Throws what the pool throws.
  template <class T, class Body>
  kj::Promise<T> ask(Answers<T>& answers, const Id& id, Body&& body);
  template <class T>
  kj::Promise<T> within(kj::Duration limit, kj::Promise<T>&& answer);
  // Likewise; and no longer than the server beats: one that is stopped is not waited for an hour.
  template <class T>
  kj::Promise<T> whileHeard(const std::string& server, kj::Duration limit, kj::Promise<T>&& answer);
  kj::Promise<void> unheard(const std::string& server);
  kj::Promise<SuspendResult> suspendLease(const Principal& who, const Id& id, uint32_t drainMs,
                                          const std::string& folder);
  kj::Promise<void> storeCordon(const Principal& who, const std::string& server, bool cordoned,
                                const Cordon& cordon);
  kj::Promise<void> beginDrain(const Principal& who, const std::string& server, kj::Duration tryFor);
  kj::Promise<void> stopDrain(const std::string& server);
  kj::Promise<MigrateResult> migrateLease(const Principal& who, const Id& id, uint32_t drainMs,
                                          const MoveTarget& to);
  kj::Promise<CheckpointResult> checkpointLease(const Principal& who, const Id& id, uint32_t drainMs,
                                                const std::string& folder);
  kj::Promise<void> failOverLease(const Principal& who, const Id& id, const ServerLife& lost, uint32_t waitMs,
                                  bool cutOff);
  kj::Promise<void> awaitHeard(const Id& id);
  kj::Promise<uint32_t> sessionsOf(const std::string& server, const Id& id, kj::TimePoint until);
  kj::Promise<void> resumeLease(const Principal& who, const Id& id, uint32_t waitMs,
                                const std::string& folder = "", const MoveTarget& to = {});
  void noteBeat(const std::string& name);
  void newFabric(const std::string& name, schema::Fabric::Reader report);

  // PoolEvents
  void grant(const Lease& lease) override;
  void revoke(const ServerLife& server, const Id& id, const std::string& reason) override;
  void suspend(const std::string& server, const Id& id, uint32_t drainMs, const std::string& folder,
               uint64_t order) override;
  void resume(const std::string& server, const Id& id, const std::string& folder, bool running,
              uint64_t order) override;
  void migrate(const std::string& server, const Id& id, uint32_t drainMs, const Lease* target,
               uint64_t order) override;
  void checkpoint(const std::string& server, const Id& id, uint32_t drainMs, const std::string& folder,
                  uint64_t order) override;
  void prepare(const Lease& target, bool here, uint64_t order) override;
  void giveBack(const Lease& target, bool here, uint64_t order) override;
  void settle(const std::string& server, const Id& id, uint64_t order) override;
  void keep(const ServerLife& standby, const Lease& lease) override;
  void dropKept(const ServerLife& standby, const Id& id) override;
  void suspended(const Id& id, const SuspendResult& result) override;
  void notSuspended(const Id& id, const Failure& failure) override;
  void resumed(const Id& id) override;
  void notResumed(const Id& id, const Failure& failure) override;
  void migrated(const Id& id, const MigrateResult& result) override;
  void notMigrated(const Id& id, const Failure& failure) override;
  void checkpointed(const Id& id, const CheckpointResult& result) override;
  void notCheckpointed(const Id& id, const Failure& failure) override;
  bool resumeWanted(const Id& id) override;
  void granted(const Lease& lease) override;
  void adopted(const Id& adopter, const Lease& lease) override;
  void failed(const Id& id, const Failure& failure) override;
  void ended(const Id& id) override;
  bool wanted(const Id& id) override;

  void superseded() override;
  uint64_t stoodStillMs() override { return clock_.stoodStillMs(); }
  kj::Promise<void> housekeeping();
  kj::Promise<void> deliverStore();

  void taskFailed(kj::Exception&& error) override;

  kj::Timer& timer_;
  ServiceLimits limits_;
  AwakeClock clock_;
  std::set<uint32_t> otherVersions_;                            // that have connected and were logged
  FailureLimit failures_{10, std::chrono::milliseconds(6000)};  // by peer: ten at once, then ten a minute
  tls::Certificate* certificate_ = nullptr;
  kj::Own<TlsDoor> door_;  // null: there is no TLS
  std::function<void()> guardTokens_ = [] {};
  PeerCount connections_, unproven_{"connections that have not proven a token yet", 64};
  std::map<std::string, Controlled> controls_;
  Counters counters_;
  kj::TimePoint missedSeenAt_ = timer_.now();  // whether their servers are there still
  Answers<Lease> waiting_;
  Answers<void> ending_, resuming_;
  Answers<SuspendResult> suspending_;
  Answers<MigrateResult> migrating_;
  Answers<CheckpointResult> checkpointing_;
  std::set<std::pair<ServerLife, Id>> revoking_;  // orders under way
  Store& store_;
  Pool pool_;
  TokenBook tokens_;
  std::list<Live> live_;
  kj::Own<kj::PromiseFulfiller<void>> superseded_;  // ends run()
  kj::Own<Tie> tie_;
  Drains drains_;
  kj::Vector<kj::Own<kj::ConnectionReceiver>> listeners_;
  kj::TaskSet tasks_;  // last, so that sessions end while all of the above lives
};

}  // namespace gpupool::pool
