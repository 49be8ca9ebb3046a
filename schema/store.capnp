@0xf98aafc5ad12f09e;
# What a server, and the manager, keep for their next life.

using Cxx = import "/capnp/c++.capnp";
using import "inventory.capnp".Id128;
using import "inventory.capnp".LeasedDevice;
using import "inventory.capnp".ServerInfo;
using import "inventory.capnp".WorkerVersion;
using import "pool.capnp".HeldLease;
using import "pool.capnp".Lease;
using import "pool.capnp".Policy;
using import "pool.capnp".TurnTerms;
$Cxx.namespace("gpupool::schema");

# What a server keeps for its next life, in <state>/server-<name>.state.
struct StoredServer @0x84f043d4673169a0 {
  bootId @0 :Text;            # /proc/sys/kernel/random/boot_id: no worker outlives the machine's restart
  devices @1 :List(StoredDevice);
  workers @2 :List(StoredWorker);
  holds @3 :List(NotedHold);
  leases @4 :List(Lease);     # that the next life is to go on with, with their keys
  workerInterface @5 :UInt32; # server/worker_interface.h: sessions of workers of another one end
  aside @6 :List(StoredAside); # likewise leases; not among those above
  copier @7 :StoredCopier;    # null: there is none, or it ends with the server
  sharing @8 :StoredSharing;
  targets @9 :List(Lease);    # of leases above that move to other GPUs here: where to, without a key
  ending @10 :List(Lease);    # not among those above: they have ended, and others have memory of them
}
# What holds for all that sessions share here, in whatever life of this server.
struct StoredSharing @0xc0b6e2d94f7a1835 {
  server @0 :Id128;           # ShareKey.server
  seal @1 :Data;              # the key of ShareAnswer.receipt
  life @2 :UInt32;            # the number of this life
  sessions @3 :List(UInt64);  # the numbers of its sessions; until it knows which go on, also of the earlier life's
}
# A piece of memory that a session shares with others, as its receipt has it.
struct SharedPiece @0xa3f4d1c7e9205b86 {
  id @7 :UInt64;              # no other piece of this server has had it, in whatever life
  session @0 :UInt64;         # its owner's number (ShareAnswer.session)
  piece @1 :UInt64;           # as in ShareOffer, and so are the next two
  place @2 :UInt32;
  bytes @3 :UInt64;
  lease @4 :Id128;            # its owner's, and the epoch of that one's placement
  deviceEpoch @5 :UInt64;
  device @6 :Data;            # its uuid; empty: it is host memory
}
# A lease whose memory the copier has, or that is on its way there or back.
struct StoredAside @0x92ac28e9b1c2fd58 {
  lease @0 :Lease;
  byTurns @1 :Bool;           # so that others have their turn, and not by order
  changing @2 :Bool;          # on its way: its whole memory is reserved, and its sessions say what has become of it
  kept @3 :List(UInt64);      # SuspendResult.kept
  movedBytes @4 :UInt64;
}
struct StoredCopier @0x9f9b8193d36e494d {
  pid @0 :UInt32;
  startTicks @1 :UInt64;      # as StoredWorker's
}
# A lease that was to be held in files, which may or may not be whole.
struct NotedHold @0xe30032d34b1ac4b0 {
  lease @0 :Id128;
  held @1 :HeldLease;
}
struct StoredDevice @0xb18701af4d5e166a {
  uuid @0 :Data;
  highestEpoch @1 :UInt64;    # of all grants
}
struct StoredWorker @0xc4c43febefab02c3 {
  pid @0 :UInt32;
  startTicks @1 :UInt64;      # when it was started, as /proc says: numbers are used again
  lease @2 :Id128;
  devices @3 :List(Data);     # their uuids
  session @4 :StoredSession;  # null: it ends with the server
  number @5 :UInt64;          # its session's, by which others that share with it know it (ShareAnswer.session)
}
# What the next life must know of a session that it is to go on with, and does not take the worker's word for.
struct StoredSession @0xc3be03a9e1f2d7a4 {
  id @0 :Id128;
  epoch @1 :UInt64;
  deviceEpoch @2 :UInt64;     # of the lease's placement where it is
  clientPid @3 :UInt32;
  command @4 :Text;
  transport @5 :Text;
  rowsHash @6 :UInt64;
  transportNamed @7 :Bool;  # SessionHello's
}

# One lease in the manager's store (key "lease/<id>"). Not the wire's Lease: it may lie on more than one server. What a
# restarted manager learns from servers and holders (deadlines, whether a granted lease is in use) is not kept here.
struct StoredLease @0x8715107ac5c11db0 {
  id @0 :Id128;
  state @1 :LeaseState;
  placements @2 :List(StoredPlacement);   # one is the primary
  ttlMs @3 :UInt32;
  tenant @4 :Text;
  holder @5 :Text;             # for people
  ending @6 :LeaseState;       # revoking: what it ends as
  reason @7 :Text;             # revoking, and the four ends: why. Suspended: why the manager did it by itself; then it is
                               # resumed when its programs call again
  bootId @8 :Text;             # of the manager's machine, for the two below and endsAtBootMs
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
  endsAtBootMs @22 :UInt64;    # with endsAtMs: the same on CLOCK_BOOTTIME of bootId, which nobody sets; 0: unknown
  fingerprint @23 :Data;       # as in LeaseRequest
  standby @24 :Text;           # the name of the server that keeps its checkpoints; empty: none does
  standbyEpoch @25 :UInt64;    # as in Lease
  grantedAtMs @26 :UInt64;     # since 1970; 0: unknown
}
struct StoredHold @0xeebb922a4c00a4b5 {
  held @0 :HeldLease;
  was @1 :StoredPlacement;     # where it was: it is restored on such devices, with this key
  atHolder @2 :Bool;           # not in files: its server is gone, and its holder has the checkpoints
}

struct StoredPlacement @0xfed0e0ca61ebb57c {
  server @0 :ServerInfo;       # without its fabric
  devices @1 :List(LeasedDevice);
  epoch @2 :UInt64;
  key @3 :Data;                # 32 bytes
  role @4 :PlacementRole;
  kept @5 :List(UInt64);       # SuspendResult.kept while the lease is suspended; empty: its reservation is whole
}

# pool-manager/lease_state.h says which follows which. A lease that is lost stays in the store until its devices are
# known to be free.
enum LeaseState @0xd523a3d3b76de510 {
  queued @0; granting @1; active @2; suspended @3; moving @4; revoking @5; released @6; expired @7; revoked @8; lost @9;
  held @10;
}
# Holds the sessions; is to hold them; would hold them; held them or was to, and its server has not said yet that it has
# given the devices up.
enum PlacementRole @0xd0f3b064b172da05 { primary @0; target @1; standby @2; left @3; }
