#pragma once
// The server: inventory, the claim on its devices, then the waiting workers, the sockets, and the membership
// in the pool. Owns all of them and the order in which they start and stop. Belongs to the event loop's
// thread.

#include <kj/async-io.h>
#include <kj/async-unix.h>

#include "server/fabric/watch.h"
#include "server/front/admission.h"
#include "server/front/checkpoints.h"
#include "server/front/control.h"
#include "server/front/copier_child.h"
#include "server/front/device_claims.h"
#include "server/front/disturb.h"
#include "server/front/figures.h"
#include "server/front/idle_watch.h"
#include "server/front/inventory.h"
#include "server/front/keeper.h"
#include "server/front/lease_tally.h"
#include "server/front/listeners.h"
#include "server/front/membership.h"
#include "server/front/migration.h"
#include "server/front/module_cache.h"
#include "server/front/options.h"
#include "server/front/readoption.h"
#include "server/front/server_state.h"
#include "server/front/standby.h"
#include "server/front/suspension.h"
#include "server/front/turn_taker.h"
#include "server/health/watch.h"

namespace gpupool::server {

class Front final : private kj::TaskSet::ErrorHandler {
 public:
  // parent: of the workers; it outlives this.
  // walls: wallsFor(options), where it was asked before the process gave up rights.
  Front(kj::AsyncIoContext& io, ServerOptions options, WorkerParent& parent = ownChildren(),
        std::optional<walls::State> walls = {});
  ~Front();

  // The walls around workers. Throws options::OptionError if --walls requires what this machine does not
  // have.
  static walls::State wallsFor(const ServerOptions& options);
  KJ_DISALLOW_COPY(Front);

  // Takes the inventory (again and again, until there are devices), opens the sockets and joins the pool.
  // Resolves when all of that runs, except that the manager may still be unreachable.
  kj::Promise<void> start();
  // Looks at the folder --workers again, and says in the log what there is now; sessions and the manager are
  // told what they have to know.
  void lookAgain();
  // Before this process ends without `stop`, and without its destructors, which would end the sessions:
  // writes down what the next one is to know.
  void leaveRunning() {
    if (leases_.get() != nullptr) store();
  }
  bool started() const { return readopted_; }  // it has sessions, or may have
  // Ends the sessions, leaves the pool, ends the workers and closes the sockets. Resolves when nothing is
  // left. Sessions of which their lease's holder has a checkpoint are told to go on elsewhere.
  kj::Promise<void> stop();

 private:
  static constexpr char kStopping[] = "the GPU server is shutting down";
  kj::Promise<Inventory> inventory(kj::Duration pause, kj::TimePoint began);
  // The GPUs of the inventory that are this server's. Throws, saying why, if none is.
  void claim(Inventory& found);
  // What is known of earlier lives changed, or what the next one must know.
  void devicesChanged();
  void store();
  // The programs of --workers, besides the one that has taken the inventory.
  kj::Promise<void> lookForWorkers(uint64_t currentRows);
  void run(Inventory inventory);
  void chooseDevices(WorkerPool::Settings& workers);
  void startWorkers();
  void startSuspension();
  void startAdmission();
  void startMigration();
  void startCheckpoints();
  void startKeeper();
  // With overcommit. Throws, saying why, if there is not the memory that it takes.
  void startTurns();
  // The copier and the sessions of this server's earlier life.
  kj::Promise<void> readopt();
  // A context ahead of time takes 527 MiB. None is made on a device whose leases reserve all of its memory
  // and use it, or will when they are resumed.
  bool hasRoomForContext(int ordinal) const;
  kj::Promise<void> listenNetwork();
  kj::Promise<void> accept(kj::ConnectionReceiver& receiver, bool network);
  void watchFabric();
  void watchHealth();
  void lookedForWorkers();

  // front_membership.cpp
  void join();
  Membership::Facts facts();
  Control::Hooks hooks();
  void describe(schema::Manager::JoinParams::Builder join);
  std::shared_ptr<const fabric::Fabric> fabric();
  void deviceLost(uint32_t ordinal, const std::string& error);
  void leaveDevice(uint32_t ordinal, const std::string& error);
  // Takes devices out of service that NVML calls broken.
  void lookAtHealth();
  // Of each device: why nothing can run on it; empty: it can.
  std::vector<std::string> problems() const;
  // True: the manager has heard it, and there is a session that goes on elsewhere.
  kj::Promise<bool> sayStopping();
  void taskFailed(kj::Exception&& exception) override;

  kj::AsyncIoContext& io_;
  kj::Timer& timer_;
  ServerOptions options_;
  WorkerParent& parent_;
  WorkerProgram program_;
  Disturb disturb_;
  Id incarnation_ = Id::random();
  walls::State walls_;  // around the workers
  bool stopping_ = false;
  bool readopted_ = false;  // what was to be; until then the next life has the same to do
  std::string bootId_;
  std::string host_;  // what programs connect to; empty: no network sessions
  uint16_t port_ = 0;
  Inventory inventory_;
  std::unique_ptr<StateFile> state_;
  std::map<std::string, uint64_t> storedEpochs_;
  std::vector<NotedHold> storedHolds_;
  std::vector<StoredGrant> storedLeases_;     // of the earlier life
  std::optional<StoredCopier> storedCopier_;  // likewise
  StoredSharing sharing_;                     // its `sessions`: likewise
  kj::Own<DeviceClaims> claims_;
  std::unique_ptr<fabric::Watch> fabric_;
  std::unique_ptr<health::Watch> health_;
  std::shared_ptr<const fabric::Fabric> toldAdapters_, toldFabric_;  // fabric()'s last answer, and what of
  kj::Own<LeaseTable> leases_;
  kj::Own<SessionTable> sessions_;
  kj::Own<Readoption> readoption_;
  kj::Own<CopierChild> copier_;
  kj::Own<Suspension> suspension_;
  kj::Own<TurnTaker> turns_;  // null: no overcommit
  kj::Own<ModuleCache> cache_;
  kj::Own<IdleWatch> idle_;
  kj::Own<LeaseTally> tally_;
  std::vector<OtherWorker> otherWorkers_;  // until pool_ has them
  bool looking_ = true;                    // at the folder of --workers; before the start, too
  bool lookAgain_ = false;                 // when that is done
  kj::Own<WorkerPools> pool_;
  kj::Own<FigureDesk> figures_;
  kj::Own<Admission> admission_;
  kj::Own<Migration> migration_;
  kj::Own<Checkpoints> checkpoints_;
  kj::Own<Keeper> keeper_;
  kj::Own<Standby> standby_;
  kj::Own<LocalListener> local_;
  kj::Own<kj::ConnectionReceiver> network_;
  kj::Own<Membership> membership_;
  kj::Own<kj::TaskSet> accepting_;  // ended first
  kj::TaskSet tasks_;               // the rest
};

}  // namespace gpupool::server
