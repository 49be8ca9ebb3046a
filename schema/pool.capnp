@0xd3b5a1c07e4f9a21;
# What outlives a call: joining, leases, heartbeats, and how a session is opened on a server.
# One side of every interface is the manager (Manager) or a server (ServerControl); the other is the `gpupool` tool acting as
# lease holder for an application. The application's own process speaks none of this: see schema/holder.h.

using Cxx = import "/capnp/c++.capnp";
using import "administration.capnp".Administration;
$Cxx.namespace("gpupool::schema");

# What is spoken, and the oldest that still is. Both ends of a connection say both numbers (Manager.login, SessionHello);
# the lower of the two versions is used, unless it is below what one of them speaks (schema/protocol.h).
#
# Within a version: fields, methods, members of enums and unions are added, at the end, with defaults that mean what there
# was before; who does not know them goes on as before. A number that was used once is never given another meaning.
# A new version (protocolVersion + 1): a peer that does not know of the change would do something wrong: a field that was
# optional is needed, one means something else, an order of calls changes, a new answer to an old question. While
# oldestProtocol is the version before, whoever makes the change has both ways in the code, and asks which version the
# connection has.
# oldestProtocol is the version before: manager, servers and clients are upgraded one after the other, in this order. It is
# raised with protocolVersion, and what is for older ones only is deleted then.
const protocolVersion :UInt32 = 9;
const oldestProtocol :UInt32 = 8;
# 9: login and SessionHello tell oldestProtocol. Version 8 knew equality only; it is answered in its own number.

struct Id128 { high @0 :UInt64; low @1 :UInt64; }

struct DeviceInfo {
  uuid @0 :Data;              # 16 bytes, as cuDeviceGetUuid gives it
  name @1 :Text;
  memoryBytes @2 :UInt64;
  computeMajor @3 :UInt32;
  computeMinor @4 :UInt32;
  pciBusId @5 :Text;
  ordinal @6 :UInt32;         # the driver's ordinal on its server
  software @7 :Bool;          # the software GPU
  problem @8 :Text;           # not empty: nothing is placed on it, and why; for people
  driverVersion @9 :UInt32;   # cuDriverGetVersion
}

struct DeviceState {
  info @0 :DeviceInfo;
  server @1 :Text;            # server name
  freeBytes @2 :UInt64;       # not reserved by any lease
  leases @3 :List(Id128);
  sample @4 :DeviceSample;    # null: its server takes none, or has not lately
}

# What a server saw last of one of its GPUs, by NVML (schema/device_sample.h). A default says that the GPU or its driver
# does not tell.
struct DeviceSample {
  ageMs @0 :UInt32;           # since it was taken
  gpuPercent @1 :Int32 = -1;  # nvmlDeviceGetUtilizationRates
  memoryPercent @2 :Int32 = -1;
  usedBytes @3 :UInt64;       # nvmlDeviceGetMemoryInfo
  totalBytes @4 :UInt64;
  temperatureC @5 :Int32 = -1000;
  powerMw @6 :UInt32;
  powerLimitMw @7 :UInt32;    # nvmlDeviceGetEnforcedPowerLimit
  smMhz @8 :UInt32;
  memoryMhz @9 :UInt32;
  eccErrors @10 :Int64 = -1;  # uncorrected, volatile
  nvlinks @11 :Int32 = -1;    # that are up
  xid @12 :UInt32;            # the last critical one since the server was started; 0: none
}

struct ServerInfo {
  name @0 :Text;              # unique in the pool; the host name by default
  incarnation @1 :Id128;      # new at every start of the server
  localPath @2 :Text;         # Unix socket for sessions of this host; empty: none
  host @3 :Text;              # where network sessions connect; empty: none
  port @4 :UInt16;
  bootId @5 :Text;            # /proc/sys/kernel/random/boot_id: tells whether a client is on the same host
  devices @6 :List(DeviceInfo);
  rowsHash @7 :UInt64;
  pid @8 :UInt32;
  fabric @9 :Fabric;          # for people, and for placement to come; not in a lease's copy of this
  leftOut @10 :List(Text);    # GPUs of the host that this server does not offer, and why; for people
  overcommitPercent @11 :UInt32 = 100;  # of each device's memory, so much may be leased: above 100, leases take turns
  walls @12 :List(Text);        # that stand around each of its workers, by name (server/walls/walls.h); for people
  missingWalls @13 :List(Text); # those that do not, with the reason; for people
  workers @14 :List(WorkerVersion);   # whose sessions it takes, the current program first; empty: rowsHash's alone
}
# A worker program of a server, or a client library: it serves clients that have the same rows.
struct WorkerVersion {
  rowsHash @0 :UInt64;        # schema::rowsHash(); of a client, 0: it is not known
  release @1 :Text;           # of gpupool; for people
}

# What a joining server knows of one of its devices from before: its server may have been restarted, and so may the
# manager.
struct DeviceReport {
  highestEpoch @0 :UInt64;    # the server refuses every grant that is not above it
  running @1 :List(Id128);    # leases whose workers still live there, of this life of the server or of an earlier one;
                              # while one of an earlier life does, DeviceInfo.problem says so and grants are refused
}

# The RDMA devices of a server, as libibverbs and sysfs tell. How many of each there may be: schema/fabric.h.
struct Fabric {
  devices @0 :List(FabricDevice);
  note @1 :Text;              # why there are none, or not all; for people
}

struct FabricDevice {
  name @0 :Text;              # mlx5_0
  nodeGuid @1 :UInt64;
  transport @2 :Text;         # InfiniBand, iWARP, ...
  firmware @3 :Text;
  pciAddress @4 :Text;        # as sysfs writes it; empty: none (Soft-RoCE on a virtual interface)
  numaNode @5 :Int32 = -1;    # -1: unknown
  gpuDistances @6 :List(PciDistance);   # to each of ServerInfo.devices, in that order
  dmaBuf @7 :DmaBuf;          # can memory regions be made of dma-buf descriptors (GPUDirect)?
  dmaBufReason @8 :Text;      # what the probe said
  problem @9 :Text;           # not empty: it could not be opened or asked, and why
  ports @10 :List(FabricPort);
}

struct FabricPort {
  number @0 :UInt32;
  state @1 :PortState;
  linkLayer @2 :LinkLayer;
  rateMbps @3 :UInt32;        # megabits a second
  mtu @4 :UInt32;             # bytes
  lid @5 :UInt32;
  netdev @6 :Text;
  gids @7 :List(FabricGid);
  defaultGid @8 :Int32 = -1;  # the index to connect with; -1: none
}

struct FabricGid {
  index @0 :UInt32;
  value @1 :Data;             # 16 bytes
  type @2 :GidType;
}

enum PortState { unknown @0; down @1; initializing @2; armed @3; active @4; activeDeferred @5; }  # ibv_port_state
enum LinkLayer { unknown @0; infiniBand @1; ethernet @2; }
enum GidType { unknown @0; infiniBand @1; roceV1 @2; roceV2 @3; }
enum DmaBuf { unknown @0; supported @1; unsupported @2; }
# What lies between two PCI devices, in nvidia-smi's words: at most one bridge each (pix), several bridges (pxb), the host
# bridge (phb), host bridges of one NUMA node (node), NUMA nodes (sys).
enum PciDistance { unknown @0; pix @1; pxb @2; phb @3; node @4; sys @5; }

struct LeaseRequest {
  id @0 :Id128;               # chosen by the requester; the same id again gives the same lease (idempotent)
  deviceCount @1 :UInt32 = 1;
  memoryBytes @2 :UInt64;     # per device; 0: the whole device
  tenant @3 :Text;
  holder @4 :Text;            # for people: "user@host pid command"
  ttlMs @5 :UInt32 = 15000;
  server @6 :Text;            # only this server; empty: any
  waitMs @7 :UInt32;          # wait this long for devices to become free; 0: fail at once
  turns @8 :TurnTerms;
  gpu @9 :Text;               # which devices (pool-manager/device_filter.h): "h200", "memory>=80GiB,compute>=9.0"; empty: any
  policy @10 :Policy;
  reason @11 :Text;           # what it is for; for people
  limitMs @12 :UInt64;        # the lease ends so long after its grant; 0: no limit
  job @13 :Text;              # not empty: a claim, for the scheduler's job "cluster:id:restart count" (pool-manager/claims.h).
                              # Its id follows from the job, and `id` counts for nothing; ttlMs is how long it may be unused
  adopts @14 :Text;           # not empty: no lease of its own, but this claim (its id or its job). Of the request count then
                              # id, tenant, holder and ttlMs, which are the adopter's
  client @15 :WorkerVersion;  # the library that its programs load: only servers with a worker program for it are of use. Not
                              # known: any
}
# A program's holder that has adopted a claim.
struct Adopter {
  id @0 :Id128;               # LeaseRequest.id of its request; all zero: none
  holder @1 :Text;            # for people
  ttlMs @2 :UInt32;
}
# Which of the devices that fit: the fullest, so that whole ones stay free; or the emptiest.
enum Policy { pack @0; spread @1; }

# How a lease takes turns with others on the devices of a server that leases more memory than they have, and how its
# sessions are protected.
struct TurnTerms {
  sharePercent @0 :UInt32;    # of a device's time, so much at least while others want it too; 0: an equal part of what
                              # the leases that name a share leave
  priority @1 :Priority = normal;
  protectMs @2 :UInt32;       # its server checkpoints each session so often, and restores it when its worker dies; 0: no
  idleMs @3 :UInt32;          # when it has not been used for so long, it is suspended, or without a session released; 0: no
  holderKeeps @4 :Bool;       # with protectMs: the lease's holder keeps the checkpoints (SessionHello.keeps), and brings them to
                              # another server when this one dies
}
enum Priority { low @0; normal @1; high @2; }  # who has a higher one goes first, and those with a lower one wait

struct LeasedDevice {
  info @0 :DeviceInfo;
  memoryBytes @1 :UInt64;     # reserved for this lease
}

struct Lease {
  id @0 :Id128;
  server @1 :ServerInfo;      # v1: all devices of a lease are on one server
  devices @2 :List(LeasedDevice);
  ttlMs @3 :UInt32;           # duration, counted from the reply on the holder's CLOCK_BOOTTIME
  deviceEpoch @4 :UInt64;     # grows with every grant; the server admits only a higher one
  sessionKey @5 :Data;        # 32 bytes; proven by HMAC-SHA256 challenge to the server, never sent to it by the holder
  holder @6 :Text;
  tenant @7 :Text;
  ageMs @8 :UInt64;           # this and state: in Manager.leases
  state @9 :Text;             # LeaseState's name
  terms @10 :TurnTerms;
  turn @11 :LeaseTurn;        # in Manager.leases: as its server's last beat said; null: it takes no turns
  movesTo @12 :Text;          # in Manager.leases, of one that is moving: "node8 GPU 1"; for people
  hindrances @13 :List(Text); # in Manager.leases: LeaseHindrances.reasons, as its servers' last beats said
  reason @14 :Text;           # in Manager.leases: LeaseRequest.reason
  endsInMs @15 :UInt64;       # until its time limit is over; 0: it has none
  protection @16 :List(Text); # in Manager.leases: LeaseHindrances.protection, as its servers' last beats said
  job @17 :Text;              # in Manager.leases, of a claim: LeaseRequest.job
  adopters @18 :List(Text);   # in Manager.leases, of a claim: who uses it, for people
  held @19 :HeldLease;        # in ServerControl.grant, of a lease that is to be restored: no session of it begins before.
                              # In Manager.leases, of one that is held; it has no server and no devices
  why @20 :Text;              # in Manager.leases, of one that is suspended: why, and on whose word; of one that is to give
                              # its devices to a higher class: that, and when
  idleMs @21 :Int64 = -1;     # in Manager.leases: LeaseUse.idleMs, by now; -1: its server does not say
}

# A lease whose sessions are in files and nowhere else.
struct HeldLease {
  checkpoint @0 :Id128;       # Checkpoint.id
  folder @1 :Text;            # the checkpoint's, as the server that has written it was told; for people
  server @2 :Text;            # that has written it
}

# Where a lease of an overcommitted server is.
struct LeaseTurn {
  id @0 :Id128;
  place @1 :TurnPlace;
  servedMs @2 :UInt64;        # it has been resident for so long, of all its life
  turns @3 :UInt32;           # how often it has come back
  note @4 :Text;              # why it could not be put aside, lately; for people
  kept @5 :List(UInt64);      # SuspendResult.kept, as far as that is known; empty: it is not
}
enum TurnPlace {
  resident @0;                # its memory is on its devices
  aside @1;                   # with the server, and it wants nothing
  waiting @2;                 # with the server, and it has something to do
}

# How a lease is used, as its server sees it.
struct LeaseUse {
  id @0 :Id128;
  idleMs @1 :UInt64;          # since a call of its programs, or the end of one, or the grant
  sessions @2 :UInt32;        # that live
  wanted @3 :Bool;            # calls arrive, or a session is asked for; also while it is suspended
}

# What is known before anybody asks of why sessions of a lease could not be moved, and of whether they are protected.
struct LeaseHindrances {
  id @0 :Id128;
  reasons @1 :List(Text);     # each once, for people, who read the lease's id before it: "cannot be moved: ..."
  protection @2 :List(Text);  # likewise, of a lease with TurnTerms.protectMs: "is protected for 5m: ...", or why it is not
}

interface Manager {
  # Servers.
  # reports: one of each of info.devices, in that order.
  join @0 (info :ServerInfo, control :ServerControl, reports :List(DeviceReport)) -> (beatMs :UInt32);
  # activeLeases: every lease the server would admit a session for (granted and not revoked), with or without sessions.
  # suspended: those of them whose sessions are suspended. Not one that is being resumed: its memory is coming back.
  # turns: of every lease on an overcommitted server that is not suspended by order.
  # hindrances: of every lease that has some. uses: of every lease with TurnTerms.idleMs.
  # problems: DeviceInfo.problem of each device. warmWorkers: started ahead of time and unused; `gpupool up` waits for
  # the first. known = false: join again. fabric: null while it is as last told. samples: one of each device; none where
  # the server takes none. workers: as ServerInfo's, when they have changed since they were last told; empty: they have not.
  beat @1 (name :Text, incarnation :Id128, activeLeases :List(Id128), problems :List(Text), warmWorkers :UInt32,
      fabric :Fabric, suspended :List(SuspendedLease), turns :List(LeaseTurn),
      samples :List(DeviceSample), hindrances :List(LeaseHindrances), uses :List(LeaseUse),
      workers :List(WorkerVersion)) -> (known :Bool);
  leave @2 (name :Text, incarnation :Id128) -> ();
  # Holders.
  lease @3 (request :LeaseRequest) -> (lease :Lease);      # fails with a clear text: none free, and who holds them
  # Fails if the lease is gone. adopter: of a claim, who renews it. notice: not empty: the lease ends in endsInMs, and why.
  # clients: the libraries of the programs that have opened sessions over this holder; they count instead of
  # LeaseRequest.client from then on.
  renew @4 (id :Id128, adopter :Adopter, clients :List(WorkerVersion)) -> (ttlMs :UInt32, notice :Text, endsInMs :UInt64);
  # Idempotent. drop: the lease may be lost, and an operator knows that nothing of it runs. claim: not empty: the claim of
  # this id or job, instead of id; with a job, an operator names the tenant. adopter: not all zero: this one uses the claim
  # no more, and the claim goes on.
  release @5 (id :Id128, drop :Bool, claim :Text, tenant :Text, adopter :Id128) -> ();
  # People.
  devices @6 () -> (devices :List(DeviceState));
  servers @7 () -> (servers :List(ServerState));
  leases @8 () -> (leases :List(Lease));   # without their keys

  # Tokens. Where the manager demands them, a connection from the network gets nothing but refusals before it has proven
  # one: login, then prove; both sides prove it (schema/token_proof.h fixes the bytes). From then on the connection is the
  # token's: it may do what the token's role may (pool-manager/roles.h), in the name of the token's tenant. token: its id,
  # where it has one; a token of the manager's token file is found by its tenant. needed = false: this connection may do
  # everything already (no tokens are demanded, or it came over the Unix socket of the manager's own user); nothing is
  # proven then.
  # Servers, holders and the tool begin with login also where nothing is to be proven: there both sides see which version
  # they have in common. So what stands here of login keeps its numbers for ever.
  # protocol, oldest: the caller's protocolVersion and oldestProtocol; oldest 0: it speaks that one version. The answer is
  # the version of this connection, and where there is none, a refusal. oldest in the answer: the manager's.
  login @9 (tenant :Text, clientNonce :Data, protocol :UInt32, token :Text, oldest :UInt32) ->
      (needed :Bool, serverNonce :Data, protocol :UInt32, oldest :UInt32);
  prove @10 (proof :Data) -> (proof :Data);

  # Operators. While a server is cordoned, nothing new is placed on it; what it has goes on. Returns when the store has it.
  # From then on Manager.leases names every lease that the server will have before that ends. Idempotent. by: whose word
  # it is, "user@host"; for people, like the reason.
  cordon @11 (server :Text, cordoned :Bool, reason :Text, by :Text) -> ();

  # Operators. Cordons the server (it stays so: Manager.cordon), and has its leases moved to other servers, one after the
  # other, as far as they can be moved and there is room; those that stay are tried again every minute until tryMs have
  # passed. What has begun goes on whether or not anybody looks, until that is over, stopDrain, or the server is not cordoned
  # any more; it is stored, and a manager that is started again begins it again, when the servers have had time to come back.
  # Returns when cordon and drain are stored. Asked again, it begins again, with the new tryMs. reason: empty: that of a
  # cordon that is there already. stay: no lease is moved.
  drain @21 (server :Text, reason :Text, by :Text, tryMs :UInt64, stay :Bool) -> (state :DrainState);
  # How it is with that server. after: DrainState.latest, of which words were seen already.
  drainState @22 (server :Text, after :UInt64) -> (state :DrainState);
  # No further move is begun. The one that is under way goes on, and the server stays cordoned.
  stopDrain @23 (server :Text) -> ();

  # The lease's owner, and operators. Takes the memory of the lease's sessions off its devices and keeps it in the
  # server's own memory; the devices are free for other leases but for what stays. Programs see that calls take longer
  # and nothing else. Returns when that is done and stored; fails with the reason, and then the sessions run as before:
  # drainMs: what runs on the devices has so long to finish. Of a suspended lease: the same answer again.
  # folder: not empty: the sessions go into files, as by checkpoint, and leave their workers and their server: the lease
  # is `held` then, and has no devices.
  suspend @12 (id :Id128, drainMs :UInt32, folder :Text) -> (result :SuspendResult);
  # Brings it back to the same devices, as soon as there is room: waits for it as a lease does, at most waitMs. Fails with
  # what is missing, and who holds it. Of a lease that is not suspended: does nothing.
  # folder: not empty: the lease is held, in files there: devices like those that it had are found for it, and its sessions
  # go to new workers. to: on which server (empty: the one that has written the files), and which devices of it (empty:
  # any). Where that fails, the lease is held as before. Of a lease that runs: fails.
  resume @13 (id :Id128, waitMs :UInt32, folder :Text, to :MoveTarget) -> ();

  # The lease's owner, and operators. Moves the lease's sessions to where `to` says; programs see that calls take longer
  # and nothing else. Returns when all of them have moved.
  # Without a target the lease keeps its devices, and its sessions go to other workers of its server: the manager stores
  # nothing of that, and one that ends meanwhile changes nothing.
  # With one, devices are reserved for the lease there before its first session moves, and stored: the lease is `moving`,
  # and has both placements until all of its sessions are on one of them. Where a session cannot be moved, the command
  # fails with the reason; sessions that have moved run where they are now, the others where they were, and the lease
  # stays `moving`. Asked again, with the same target or none, it goes on. Of a lease that nothing of has moved: it is
  # again what it was.
  migrate @14 (id :Id128, drainMs :UInt32, to :MoveTarget) -> (result :MigrateResult);

  # The lease's owner, and operators. Writes the lease's sessions into files of its server, a checkpoint: in a folder of
  # that name in the server's checkpoint folder. All sessions stand still for that at one moment; programs see that calls
  # take longer and nothing else. Returns when it is on the disk; fails with the reason, and then nothing of it is.
  # drainMs: as in migrate.
  checkpoint @18 (id :Id128, drainMs :UInt32, folder :Text) -> (result :CheckpointResult);

  # The lease's holder. Where a session of the lease that moves finds its next worker first, and where new sessions begin
  # last: one server, or two while the lease is moving. The lease's key is the same on both. None while it is held, and
  # before it has been restored: ask again.
  places @15 (id :Id128) -> (servers :List(ServerInfo));

  # The lease's holder, which keeps the checkpoints of its sessions (TurnTerms.holderKeeps): the server on which the lease
  # was does not answer it any more. The lease leaves that server, which is told so if it comes back, and gets devices like
  # those that it had, there or elsewhere, as soon as there are some: waits as a lease does, at most waitMs. Returns the
  # lease as it is then. Of a lease that is on another server by now, or on another life of that one: does nothing more.
  # waitMs 0: at once or not at all. Where the manager hears that server itself, or there is no other place, or others
  # wait for GPUs, it fails (FAILED), and the lease stays where it is.
  failOver @20 (id :Id128, server :Text, incarnation :Id128, waitMs :UInt32) -> (lease :Lease);

  # What would become of this request if it were made now; nothing is leased, and nobody waits. Its id counts for nothing.
  explain @16 (request :LeaseRequest) -> (explanation :Explanation);
  # What has happened to leases and servers, the oldest first: after the entry of that number, not more than sinceMs ago
  # (0: ever), of leases whose id begins with these digits (empty: all, and what is about servers). As many as one answer
  # takes; more: ask again, after the last one's number.
  audit @17 (after :UInt64, sinceMs :UInt64, lease :Text) -> (entries :List(AuditEntry), more :Bool);

  # Tokens and quotas.
  administration @19 () -> (administration :Administration);
}

struct DrainState {
  cordoned @0 :Bool;
  moving @1 :Bool;            # leases are being moved, or will be when the servers are back (the manager was started again)
  goesOn @2 :Bool;            # likewise, or they will be tried again
  leases @3 :List(DrainedLease);  # of which the server has anything
  words @4 :List(DrainWord);  # what has become of moves, the oldest first; as many as are remembered
  latest @5 :UInt64;          # the number of the last one
}
struct DrainedLease {
  id @0 :Id128;
  state @1 :Text;             # LeaseState's name
  leaves @2 :Bool;            # it has moved, and the server has not said yet that it has given up what it had
  note @3 :Text;              # why it has not moved; empty: that was not tried, or not lately
}
struct DrainWord {
  number @0 :UInt64;          # grows, over all servers and restarts of the manager
  lease @1 :Id128;
  moved @2 :Bool;
  text @3 :Text;              # where to, or why not
}

struct Explanation {
  outlook @0 :Outlook;
  text @1 :Text;              # where it would be, or what is missing; one line
  ahead @2 :UInt32;           # requests that would be before it in the queue
  servers @3 :List(ServerVerdict);
}
enum Outlook {
  now @0;                     # it would be served at once
  devices @1;                 # when devices are free
  queue @2;                   # when those that are before it in the queue have been served
  server @3;                  # when a server that is away is back, or a broken device works again
  operator @4;                # when a server that is cordoned is back in service
  never @5;
  quota @6;                   # when leases of its own tenant have ended
}
struct ServerVerdict {
  name @0 :Text;
  reason @1 :Text;            # not empty: why nothing would be leased there now, whatever its devices are
  devices @2 :List(DeviceVerdict);
}
struct DeviceVerdict {
  ordinal @0 :UInt32;
  name @1 :Text;
  reason @2 :Text;            # why the request would not get it now; empty: it could
}

# One thing that has happened. The manager keeps the latest ones in its store (key "audit/<number>"), written in the same
# transaction as what they tell of.
struct AuditEntry {
  number @0 :UInt64;          # grows
  timeMs @1 :UInt64;          # since 1970
  event @2 :AuditEvent;
  lease @3 :Id128;            # all zero: it is about a server
  server @4 :Text;            # where: of a lease "node7 GPUs 0,1"
  tenant @5 :Text;            # this and holder: of the lease
  holder @6 :Text;
  by @7 :Text;                # on whose word
  reason @8 :Text;
}
enum AuditEvent {
  queued @0; unserved @1;     # a request waits; and has left the queue without a lease
  granted @2; suspended @3; resumed @4; moving @5; moved @6;
  released @7; expired @8; revoked @9; lost @10;
  cordoned @11; uncordoned @12;
  tokenCreated @13; tokenRevoked @14; quotaSet @15;   # of a tenant; holder says which
  adopted @16; left @17;      # of a claim: a program uses it; and uses it no more
  held @18; restored @19;
  preempting @20;             # it is to give its devices to a request of a higher class: it is being suspended, or has notice
}

# Where a lease is to go. All empty: to other workers on the same devices.
struct MoveTarget {
  server @0 :Text;              # its name; empty: the lease's own, or with `elsewhere` any other that has room
  devices @1 :List(UInt32);     # ordinals there, one for each device of the lease; empty: any that fit and are not the
                                # lease's
  elsewhere @2 :Bool;           # any other server
}

struct SuspendResult {
  kept @0 :List(UInt64);      # by device of the lease: bytes that stay there, besides contexts and code
  movedBytes @1 :UInt64;      # what left the devices
  drainMs @2 :UInt32;         # the longest wait of a session for its devices
  moveMs @3 :UInt32;          # from then until the memory was free, the longest
  held @4 :HeldLease;         # null: it is not in files
}
struct SuspendedLease {
  id @0 :Id128;
  kept @1 :List(UInt64);      # SuspendResult.kept
  held @2 :HeldLease;         # SuspendResult.held
}

struct ServerState {
  info @0 :ServerInfo;
  lastBeatMs @1 :UInt64;      # ago
  alive @2 :Bool;
  warmWorkers @3 :UInt32;
  cordoned @4 :Bool;
  cordonReason @5 :Text;
  cordonedBy @6 :Text;
  cordonedS @7 :UInt64;       # seconds ago; 0: unknown
  absent @8 :Bool;            # it is not in the pool now: only its name, and that it is cordoned, is known
}

struct CheckpointResult {
  sessions @0 :UInt32;
  bytes @1 :UInt64;             # in the files
  longestPauseMs @2 :UInt32;    # for which a session's program stood still
  folder @3 :Text;              # its path on the server
  server @4 :Text;              # from the manager
}

interface ServerControl {   # not "Server": generated C++ has a class Server in every interface
  # Called by the manager on the connection that the server made when it joined.
  grant @0 (lease :Lease) -> ();          # before the holder hears of it: the server then admits its sessions
  revoke @1 (id :Id128, reason :Text) -> (); # ends its sessions; returns when their device memory is free
  sessions @2 () -> (sessions :List(SessionState));  # living ones, then those that ended lately
  # As Manager.suspend, all sessions of the lease or none. From here on the lease's memory but `kept` is free to be
  # granted, and no session of it is begun before it is resumed: who asks for one is told to ask again.
  suspend @3 (id :Id128, drainMs :UInt32, folder :Text) -> (result :SuspendResult);
  # Fails if the memory is not there: the lease is still suspended then.
  resume @4 (id :Id128, folder :Text) -> ();
  # Moves all sessions of the lease that are here, one after the other, each to another worker process. Programs see that
  # calls take longer and nothing else. Fails with the first reason: each session then runs where it was or, where it had
  # been moved before, in its new worker. Of a suspended lease: refused. drainMs: as in Manager.suspend.
  # target: null: workers of this server, with the devices that the lease has. Else the placement that the lease has as
  # its target: on this server (addTarget came before) or on another one (which has had grant).
  migrate @5 (id :Id128, drainMs :UInt32, target :Lease) -> (result :MigrateResult);
  # Reserves other devices of this server for a lease that is here: target.devices, with target.deviceEpoch. Refused as a
  # grant would be. From then on sessions of the lease may move to them. Idempotent.
  addTarget @6 (target :Lease) -> ();
  # Ends that: the lease's devices are from now on those of addTarget (moved), or those that it had. Refused while a
  # session of the lease uses the others. Of a lease without a target: does nothing.
  settle @7 (id :Id128, moved :Bool) -> ();
  # As Manager.checkpoint. Of a suspended lease: refused.
  checkpoint @8 (id :Id128, drainMs :UInt32, folder :Text) -> (result :CheckpointResult);
}

struct MigrateResult {
  sessions @0 :UInt32;          # moved
  movedBytes @1 :UInt64;        # of device memory, of all together
  longestPauseMs @2 :UInt32;    # for which a session's program stood still
  server @3 :Text;              # where the lease is now; from the manager
}

struct SessionState {
  session @0 :Id128;
  lease @1 :Id128;
  workerPid @2 :UInt32;
  clientPid @3 :UInt32;
  command @4 :Text;
  ageMs @5 :UInt64;
  ended @6 :Bool;
  text @7 :Text;              # why it ended
}

# The handshake on a session's socket, before the worker takes the socket over. Each is one message in the standard
# stream framing. holder -> server: SessionHello; server -> holder: SessionChallenge; holder -> server: SessionProof;
# server -> holder: SessionAnswer. After `ok` the socket belongs to the worker on that side, and the holder passes its
# end to the application. Both sides prove the key: proof = HMAC-SHA256(key, role ‖ session ‖ epoch ‖ clientNonce ‖
# serverNonce ‖ server name), role "holder" or "server"; schema/handshake.h fixes the bytes.
struct SessionHello {
  protocol @0 :UInt32;        # this and oldest: as in Manager.login
  rowsHash @1 :UInt64;        # the client's: which of the server's worker programs serves it. Of who wants no session: nothing
  lease @2 :Id128;
  session @3 :Id128;
  epoch @4 :UInt64;           # 1 for a new session; of one that has moved: its next
  clientNonce @5 :Data;       # 32 bytes
  transport @6 :Text;         # "shm" or "ucx"
  pid @7 :UInt32;             # of the application, for people
  command @8 :Text;           # for people
  arrives @9 :Bool;           # not from a holder: from the server that the session leaves, which knows the lease's key,
                              # too. After `ok` this socket is the state stream (MoveOrder) of the worker that rebuilds
                              # the session; its client comes later, with the same session and epoch.
  asks @10 :Bool;             # no session: the holder asks for what NVML says of the lease's devices. After `ok`: FiguresQuery
                              # and FiguresReport in turns, until one of the two closes. Also of a suspended lease.
  keeps @11 :Bool;            # no session: the holder keeps the checkpoints of the lease's sessions. After `ok`, for each one:
                              # server -> holder: SessionCheckpoint, and its bytes; holder -> server: CheckpointAnswer
  brings @12 :SessionCheckpoint;  # null: none. The holder brings the session's last checkpoint, and what this server has of
                              # the session ends. After `ok`: holder -> server: its bytes; server -> holder: CheckpointAnswer.
                              # Then the client comes, with the same session and epoch.
  oldest @13 :UInt32;
  release @14 :Text;          # of gpupool, there; for people
}
# A session in a file (server/files/session_file.h), whose bytes follow this message.
struct SessionCheckpoint {
  number @0 :UInt64;          # of all that this connection brings, from 1
  session @1 :Id128;
  epoch @2 :UInt64;           # in which it was made
  clientPid @3 :UInt32;
  command @4 :Text;           # for people
  transport @5 :Text;
  bytes @6 :UInt64;           # 0, of what a holder brings: nothing was kept, and the session begins anew
  digest @7 :Data;            # FileFacts', 32 bytes; empty where there are no bytes
  lastFrame @8 :UInt64;
  lastAside @9 :UInt64;
  driverVersion @10 :UInt32;
  # From a server: the checkpoint that this connection has brought of the session, and whose blocks these name; 0: none.
  base @11 :UInt64;
  blocks @12 :List(CheckpointBlock);  # empty: all bytes follow. Else those of the new blocks do, in their order
}
struct CheckpointBlock {
  bytes @0 :UInt32;           # 1 to 4 MiB; of all together: SessionCheckpoint.bytes
  base @1 :UInt32;            # the number of a block of the base that has the same bytes, from 1; 0: a new one
}
struct CheckpointAnswer {
  number @0 :UInt64;          # SessionCheckpoint.number
  error @1 :Text;             # empty: it is there, whole. Else why not, for people
}
struct SessionChallenge {
  serverNonce @0 :Data;
  proof @1 :Data;             # the server's own
  protocol @2 :UInt32;        # of this connection; refused for its version: the server's
  rowsHash @3 :UInt64;        # the client's, if the server has a worker program for it; else that of its current one
  error @4 :Text;             # not empty: refused (unknown lease, version or rows mismatch naming both), socket closes
  unknownLease @5 :Bool;      # refused: the lease is over, or was granted before this server was started again
  otherVersion @6 :Bool;      # refused for that. Before version 9 one of the two numbers above was another one then
}
struct SessionProof { proof @0 :Data; }
struct SessionAnswer {
  ok @0 :Bool;
  error @1 :Text;
  suspended @2 :Bool;         # refused only for now, because the lease is suspended: ask again
}

# What NVML says of the lease's devices, now.
struct FiguresQuery { maxAgeMs @0 :UInt32; }   # no older, if that can be had within a second
struct FiguresReport {
  devices @0 :List(Data);     # of the lease, in its order: schema/nvml_figures.h; empty: not now, and why
  ageMs @1 :UInt32;           # since the figures that change were taken
  error @2 :Text;
}

# Between server and worker, over the worker's own socket pair (descriptor 3, SOCK_SEQPACKET). One worker serves one
# session and then exits. It opens no file by a path: what it needs comes with the start, by SCM_RIGHTS.
# A server starts workers of earlier builds, too. What must not change for them: server/worker_interface.h.
struct WorkerOrder {   # server -> worker
  union {
    start @0 :WorkerStart;
    stop @1 :Text;                    # end the session now, and why
    memory @2 :MemoryAnswer;
    suspend @3 :SuspendOrder;         # a socket to the copier comes with it (server/copier/protocol.h)
    resume @4 :Void;
    serve @5 :Void;                   # to the copier: a worker's end of such a socket comes with it
    move @6 :MoveOrder;               # to the old worker: a socket to the copier (not with MoveOrder.stream) and its end
                                      # of the state socket come with it, in this order
    client @7 :Void;                  # to the new worker: the client's socket comes with it
    kept @8 :KeptCheckpoint;          # of a protected session: the server keeps a whole checkpoint of that moment
    share @9 :ShareAnswer;            # the descriptor of what was opened comes with it
    gone @10 :UInt64;                 # the session of that number, which shared events with this one, has ended
  }
}
# Moves the session to another worker. Both have an end of a socket pair (SOCK_STREAM, the state socket) over which the
# old one sends what the session is, and the new one says whether it has rebuilt it. Old and new worker answer the
# server with `moved` and `rebuilt`.
struct MoveOrder {
  drainMs @0 :UInt32;                 # as in Manager.suspend
  epoch @1 :UInt64;                   # the session's next
  stream @2 :Bool;                    # the other worker is on another machine: no descriptor can be passed, and all bytes
                                      # go over the state socket, which is a TCP connection
  hold @4 :Bool;                      # with stream: at the other end is who writes the session into a file, and it goes
                                      # there: its client leaves, and no worker waits for it
  copy @3 :Bool;                      # with stream: at the other end is no worker, but who writes the session into a
                                      # file. It goes on here, in any case, and `moved` says whether it is written
  pages @5 :Bool;                     # with copy: it is kept in pages, and who keeps it says first what it has already
                                      # (server/worker/session_pages.h)
  direct @6 :Bool;                    # without stream: the other worker has none of the devices that this one has. The
                                      # memory stays until the client has left, and is copied from device to device
}
struct KeptCheckpoint {
  frame @0 :UInt64;                   # the last frame and aside call that it has
  aside @1 :UInt64;
}
struct SuspendOrder {
  drainMs @0 :UInt32;                 # as in Manager.suspend
}
# The answer to suspend and to resume, when it is done or has failed.
struct SuspendReport {
  suspended @0 :Bool;                 # what the session is now
  error @1 :Text;                     # not empty: the order was not carried out, and why
  kept @2 :List(UInt64);              # by device of WorkerStart.devices: bytes that stay there, besides its context
  movedBytes @3 :UInt64;
  drainMs @4 :UInt32;
  moveMs @5 :UInt32;
}
enum Descriptor {
  clientSocket @0;                    # the session's bootstrap socket; always there
  moduleCache @1;                     # the tenant's folder; absent: no cache
  deviceLock @2;                      # of a device of the lease: held until the worker's process has ended
  state @3;                           # the state socket (MoveOrder); with WorkerStart.rebuild, and only there
}
struct WorkerStart {
  session @0 :Id128;
  epoch @1 :UInt64;
  transport @2 :Text;
  devices @3 :List(LeasedDevice);   # info.ordinal: the driver's
  networkDevice @4 :Text;
  networkWire @8 :Text;             # "auto", "tcp", "rdma"; empty: auto
  descriptors @5 :List(Descriptor); # what each descriptor is that came with this message, in their order
  moduleCacheBytes @7 :UInt64;      # files in the cache's folder may be so much together
  clientPid @6 :UInt32;
  reportActivity @9 :Bool;          # WorkerReport.activity is wanted: the lease takes turns
  rebuild @10 :Bool;                # the session moves here: the state socket comes instead of the client's, which
                                    # follows with the order `client`
  stream @11 :Bool;                 # with rebuild: as in MoveOrder
  protected @12 :Bool;              # checkpoints of the session will be made, in pages
  holderKeeps @13 :Bool;            # likewise TurnTerms.holderKeeps: when the server dies, the worker ends without a word, for
                                    # the session goes on elsewhere
}
struct WorkerReport {
  driver @4 :Text;                  # the library that was loaded: later workers are told to load the same
  rowsHash @5 :UInt64;              # of the rows the worker was built with
  walls @14 :List(Text);            # with ready: what stands around this process
  union {
    ready @0 :Void;                 # warm: cuInit done
    devices @1 :List(DeviceInfo);   # answer to --inventory
    ended @2 :Text;                 # the session is over; why, for people
    failed @3 :Text;                # could not start
    lost @6 :DeviceLost;            # a device of the session broke; the session goes on to its end
    memory @7 :MemoryRequest;
    suspended @8 :SuspendReport;
    disturb @9 :Void;               # tests: suspend this session now and resume it, or move it (GPUPOOL_DISTURB)
    activity @10 :Activity;         # when it changes; at the start of a session it is busy
    rebuilt @11 :Text;              # of a new worker, once: not empty: it could not rebuild the session, and why
    moved @12 :MoveReport;          # the answer to `move`, when it is done or has failed
    hindrances @13 :List(Text);     # when it changes: what keeps the session from being moved, for people. At the start of
                                    # a session, and in a new worker's: nothing
    log @15 :LogReport;             # when it changes: what a protected session's client has kept of its calls
    share @16 :ShareReport;
  }
}
struct LogReport {                  # schema/frame.h: LogBody
  frameBytes @0 :UInt64;
  payloadBytes @1 :UInt64;
  wanted @2 :Bool;                  # it is nearly full: a checkpoint is wanted
  obstacle @3 :Text;                # not empty: why the calls since the last checkpoint could not be made again
}
struct MoveReport {
  error @0 :Text;                   # not empty: the session stays where it was, and why. Empty: its client has gone
                                    # over, and this worker exits
  movedBytes @1 :UInt64;            # of device memory
  drainMs @2 :UInt32;               # until client and device stood still
  pauseMs @3 :UInt32;               # from then until the client had gone over
}
enum Activity {
  busy @0;                          # calls of its program have arrived within the last half second
  quiet @1;                         # none has; what runs on the device is not looked at
  waiting @2;                       # the session is suspended, and a call of its program has arrived
}

# The lease's account of memory: kept by the server for all sessions of a lease together, as one process may not use
# what another has. A worker takes before it allocates, and gives back what it has released; what it still has when its
# process ends is given back by the server.
struct MemoryRequest {
  ticket @0 :UInt64;                  # of a take: the answer repeats it; 0: no answer is wanted
  place @1 :UInt32;                   # index into WorkerStart.devices; hostMemory: pinned memory of the server
  take @2 :UInt64;                    # bytes
  give @3 :UInt64;
}
const hostMemory :UInt32 = 0xffffffff;
struct MemoryAnswer {
  ticket @0 :UInt64;
  granted @1 :Bool;
  othersBytes @2 :UInt64;             # what the lease's other sessions have in that place
  error @3 :Text;                     # why not, where it is not the lease's limit; for the log
}
# What the sessions of a lease share: a worker offers parts of pieces of its memory, and the server gives a piece's
# descriptor to the workers that open such a part. It lives until nobody has it.
struct ShareReport {
  ticket @0 :UInt64;                  # the answer repeats it; 0: no answer is wanted
  union {
    offer @1 :ShareOffer;             # the piece's descriptor comes with it
    endOffer @2 :ShareKey;
    endPiece @3 :UInt64;              # has ended in this session, and what it has taken for it is given back
    open @4 :ShareKey;
    close @5 :UInt64;                 # ShareAnswer.opening
  }
}
struct ShareOffer {
  piece @0 :UInt64;                   # the worker's own number of it, from 1
  place @1 :UInt32;                   # as in MemoryRequest; hostMemory: events
  bytes @2 :UInt64;                   # of the piece
  offset @3 :UInt64;                  # what is offered of it
  length @4 :UInt64;
}
struct ShareKey {                     # ShareToken in schema/session_calls.h
  server @0 :Id128;
  key @1 :Id128;
}
enum ShareError {
  none @0;
  unknown @1;                         # no such offer for this lease
  elsewhere @2;                       # of another server, or of an earlier life of this one
  own @3;                             # the asking session's
  tooMany @4;                         # offers, or descriptors
}
struct ShareAnswer {
  ticket @0 :UInt64;
  error @1 :ShareError;
  key @2 :ShareKey;                   # of what was offered
  opening @3 :UInt64;                 # of what was opened: its number, for `close`
  offer @4 :ShareOffer;               # likewise; piece: nothing
  session @5 :UInt64;                 # the asking session's number (WorkerOrder.gone)
}
struct DeviceLost {
  ordinal @0 :UInt32;               # the driver's
  text @1 :Text;                    # the driver's error
}

# What a server keeps for its next life, in <state>/server-<name>.state.
struct StoredServer {
  bootId @0 :Text;            # /proc/sys/kernel/random/boot_id: no worker outlives the machine's restart
  devices @1 :List(StoredDevice);
  workers @2 :List(StoredWorker);
  holds @3 :List(NotedHold);
}
# A lease that was to be held in files, which may or may not be whole.
struct NotedHold {
  lease @0 :Id128;
  held @1 :HeldLease;
}
struct StoredDevice {
  uuid @0 :Data;
  highestEpoch @1 :UInt64;    # of all grants
}
struct StoredWorker {
  pid @0 :UInt32;
  startTicks @1 :UInt64;      # when it was started, as /proc says: numbers are used again
  lease @2 :Id128;
  devices @3 :List(Data);     # their uuids
}

# One lease in the manager's store (key "lease/<id>"). Not the wire's Lease: it may lie on more than one server. What a
# restarted manager learns from servers and holders (deadlines, whether a granted lease is in use) is not kept here.
struct StoredLease {
  id @0 :Id128;
  state @1 :LeaseState;
  placements @2 :List(StoredPlacement);   # one is the primary
  ttlMs @3 :UInt32;
  tenant @4 :Text;
  holder @5 :Text;             # for people
  ending @6 :LeaseState;       # revoking: what it ends as
  reason @7 :Text;             # revoking, and the four ends: why. Suspended: why the manager did it by itself; then it is
                               # resumed when its programs call again
  bootId @8 :Text;             # of the manager's machine, for the two below
  holderPid @9 :UInt32;        # its holder's process, if it runs on the manager's machine; else 0
  holderStartTicks @10 :UInt64; # when that was started, as /proc says: numbers are used again
  terms @11 :TurnTerms;
  gpu @12 :Text;               # this and the following: as in LeaseRequest
  policy @13 :Policy;
  purpose @14 :Text;           # LeaseRequest.reason
  limitMs @15 :UInt64;
  endsAtMs @16 :UInt64;        # since 1970: when the limit is over; 0: there is none
  job @17 :Text;               # as in LeaseRequest
  hold @18 :StoredHold;        # null: its sessions are in no files. Held, it has no placement but those that it has left;
                               # being restored, it has one
  suspendedBy @19 :Text;       # suspended: on whose word; empty: the manager's own
  preemptor @20 :Id128;        # suspended: the request that has taken its devices; it resumes when it is its turn. All zero:
                               # none
  client @21 :WorkerVersion;   # as in LeaseRequest
}
struct StoredHold {
  held @0 :HeldLease;
  was @1 :StoredPlacement;     # where it was: it is restored on such devices, with this key
  atHolder @2 :Bool;           # not in files: its server is gone, and its holder has the checkpoints
}

struct StoredPlacement {
  server @0 :ServerInfo;       # without its fabric
  devices @1 :List(LeasedDevice);
  epoch @2 :UInt64;
  key @3 :Data;                # 32 bytes
  role @4 :PlacementRole;
  kept @5 :List(UInt64);       # SuspendResult.kept while the lease is suspended; empty: its reservation is whole
}

# pool-manager/lease_state.h says which follows which. A lease that is lost stays in the store until its devices are
# known to be free.
enum LeaseState {
  queued @0; granting @1; active @2; suspended @3; moving @4; revoking @5; released @6; expired @7; revoked @8; lost @9;
  held @10;
}
# Holds the sessions; is to hold them; would hold them; held them or was to, and its server has not said yet that it has
# given the devices up.
enum PlacementRole { primary @0; target @1; standby @2; left @3; }
