@0xd3b5a1c07e4f9a21;
# What outlives a call: joining, leases, heartbeats. How a session is opened on a server: session.capnp.
# One side of every interface is the manager (Manager) or a server (ServerControl); the other is the `gpupool` tool acting as
# lease holder for an application. The application's own process speaks none of this: see schema/holder.h.

using Cxx = import "/capnp/c++.capnp";
using import "administration.capnp".Administration;
using import "inventory.capnp".DeviceInfo;
using import "inventory.capnp".DeviceReport;
using import "inventory.capnp".DeviceSample;
using import "inventory.capnp".DeviceState;
using import "inventory.capnp".Fabric;
using import "inventory.capnp".Id128;
using import "inventory.capnp".LeasedDevice;
using import "inventory.capnp".ServerInfo;
using import "inventory.capnp".WorkerVersion;
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
  fingerprint @16 :Data;      # of all that a request over REST has said (pool-manager/rest/requests.h): another one with its key
                              # is not the same request again. Empty: of none
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
  protectByTenant @5 :Bool;   # in a request: where protectMs is 0, it is what the tenant has (Quota.protectMs), and holderKeeps
                              # counts then
  standbyKeeps @6 :Bool;      # with holderKeeps: another server of the pool, Lease.standby, keeps them instead of the holder
                              # while there is one
}
enum Priority { low @0; normal @1; high @2; }  # who has a higher one goes first, and those with a lower one wait

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
  why @20 :Text;              # in Manager.leases, of one that is suspended: why, and on whose word; of one that is held:
                              # where; of one that is to give its devices to a higher class: that, and when; of one that is
                              # revoking: who has memory of it still
  idleMs @21 :Int64 = -1;     # in Manager.leases: LeaseUse.idleMs, by now; -1: its server does not say
  standby @22 :ServerInfo;    # with TurnTerms.standbyKeeps: which server keeps its checkpoints; null: none, and its holder does
  standbyEpoch @23 :UInt64;   # grows with every standby that the lease is given; its server takes none with a lower one
}

# A lease whose checkpoints a server keeps as its standby.
struct KeptLease {
  id @0 :Id128;
  standbyEpoch @1 :UInt64;    # Lease.standbyEpoch
  deviceEpoch @2 :UInt64;     # of where it takes them from
}

# A lease whose sessions are in files and nowhere else.
struct HeldLease {
  checkpoint @0 :Id128;       # Checkpoint.id
  folder @1 :Text;            # the checkpoint's, as the server that has written it was told; for people
  server @2 :Text;            # that has written it
}

# A lease with which a server goes on that was started again: its workers have lived on, and it has the same devices.
struct ReadoptedLease {
  id @0 :Id128;
  deviceEpoch @1 :UInt64;     # of the placement that it has there
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

# What the programs of a lease have done on its server, since the lease came there or the server was started. Counters:
# whoever adds them up takes a lower number for a new beginning.
struct LeaseCounts {
  id @0 :Id128;
  calls @1 :UInt64;           # of the driver, that have arrived
  awaited @2 :UInt64;         # of these, those whose answer the program has waited for
  toDeviceBytes @3 :UInt64;   # copied from the program's memory to the devices
  fromDeviceBytes @4 :UInt64; # and from them
  checkpointAgeMs @5 :Int64 = -1;  # of a protected lease: since the last checkpoint of the session whose checkpoint is the
                              # oldest; -1: there is none
}

# What is known before anybody asks of why sessions of a lease could not be moved, and of whether they are protected.
# Besides, of one that has been revoked, why its server cannot confirm that yet.
struct LeaseHindrances {
  id @0 :Id128;
  reasons @1 :List(Text);     # each once, for people, who read the lease's id before it: "cannot be moved: ..."
  protection @2 :List(Text);  # likewise, of a lease with TurnTerms.protectMs: "is protected for 5m: ...", or why it is not
  lentTo @3 :Text;            # not empty: it has been revoked, and who of the tenant's other leases has memory of it still; its
                              # devices are not free before that is over
}

interface Manager {
  # Servers.
  # reports: one of each of info.devices, in that order. readopted: leases that an earlier life of this server had, and
  # with which this one goes on (docs/design.md).
  join @0 (info :ServerInfo, control :ServerControl, reports :List(DeviceReport), readopted :List(ReadoptedLease)) ->
      (beatMs :UInt32);
  # activeLeases: every lease the server would admit a session for (granted and not revoked), with or without sessions.
  # suspended: those of them whose sessions are suspended. Not one that is being resumed: its memory is coming back.
  # turns: of every lease on an overcommitted server that is not suspended by order.
  # hindrances: of every lease that has some. uses: of every lease with TurnTerms.idleMs.
  # problems: DeviceInfo.problem of each device. warmWorkers: started ahead of time and unused; `gpupool up` waits for
  # the first. counts: of every lease with a session, now or earlier. known = false: join again. fabric: null while it is
  # as last told. samples: one of each device; none where the server takes none. workers: as ServerInfo's, when they have
  # changed since they were last told; empty: they have not. kept: of every lease whose standby this server is, by order.
  beat @1 (name :Text, incarnation :Id128, activeLeases :List(Id128), problems :List(Text), warmWorkers :UInt32,
      fabric :Fabric, suspended :List(SuspendedLease), turns :List(LeaseTurn),
      samples :List(DeviceSample), hindrances :List(LeaseHindrances), uses :List(LeaseUse),
      workers :List(WorkerVersion), counts :List(LeaseCounts), kept :List(KeptLease)) -> (known :Bool);
  leave @2 (name :Text, incarnation :Id128) -> ();
  # Holders.
  lease @3 (request :LeaseRequest) -> (lease :Lease);      # fails with a clear text: none free, and who holds them
  # Fails if the lease is gone. adopter: of a claim, who renews it. notice: not empty: the lease ends in endsInMs, and why.
  # clients: the libraries of the programs that have opened sessions over this holder; they count instead of
  # LeaseRequest.client from then on. standby: Lease.standby, by now.
  renew @4 (id :Id128, adopter :Adopter, clients :List(WorkerVersion)) -> (ttlMs :UInt32, notice :Text, endsInMs :UInt64,
      standby :ServerInfo);
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
  # From then on Manager.leases names every lease that the server will have before that ends. Idempotent. by: what the
  # asker says of itself, "user@host", behind what the manager knows of it; for people, like the reason.
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
  # any). Where that fails, the lease is held as before. Of a lease that runs, without `to`: from a checkpoint of it that was
  # written while it ran, if its programs have sent nothing since: else that is refused, and it runs on.
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
  # wait for GPUs, it fails (FAILED), and the lease stays where it is. cutOff: also where the manager hears it, for a
  # session that ran there heard nothing any more, and the server's host takes no connection from where the holder is.
  failOver @20 (id :Id128, server :Text, incarnation :Id128, waitMs :UInt32, cutOff :Bool) -> (lease :Lease);

  # What would become of this request if it were made now; nothing is leased, and nobody waits. Its id counts for nothing.
  explain @16 (request :LeaseRequest) -> (explanation :Explanation);
  # What has happened to leases and servers, the oldest first: after the entry of that number, not more than sinceMs ago
  # (0: ever), of leases whose id begins with these digits (empty: all, and what is about servers). As many as one answer
  # takes; more: ask again, after the last one's number. latest: the number of the last entry that there is, of whatever;
  # who wants only what follows asks after it from then on. 0: there is none, or the manager does not say.
  audit @17 (after :UInt64, sinceMs :UInt64, lease :Text) -> (entries :List(AuditEntry), more :Bool, latest :UInt64);

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
  serverAlive @21; serverLost @22; serverLeft @23;    # by the manager: it is heard of; no more; it has said that it ends
  stayed @24;                 # it was to move, and is where it was
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
  # running: it is neither suspended nor held: its sessions go into the checkpoint of that name, in place of what it has,
  # and are restored from it. Refused, and it runs on, unless that was written of this lease and nothing was sent since.
  resume @4 (id :Id128, folder :Text, running :Bool) -> ();
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
  # This server is the standby of a lease that is on another one (Lease.standby): from there it takes the checkpoints of the
  # lease's sessions, and keeps the last one of each in its memory. Again, and when the lease has gone elsewhere: from there
  # from now on.
  keep @9 (lease :Lease) -> ();
  # Ends that. Where the lease is on this server now, what is kept stays until there is a later checkpoint elsewhere.
  dropKept @10 (id :Id128) -> ();
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
