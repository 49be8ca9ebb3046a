@0xd1b0c5a4f3e29876;
# What a session is, apart from the bytes of its device memory: sent by the worker that it leaves to the one that
# rebuilds it (server/worker/session_state.h). Numbers and addresses are the session's; devices are indices into the
# lease's. Everything is checked by the receiver: a worker takes another one for hostile.
using Cxx = import "/capnp/c++.capnp";
$Cxx.namespace("gpupool::schema");

# Of what follows the record, and of its meaning where rowsHash does not tell: who sees another one refuses it.
const stateFormat :UInt32 = 1;
# Likewise, of a record with `ahead`: a worker of an earlier build refuses it before the program has to wait.
const aheadFormat :UInt32 = 2;

struct SessionRecord {
  rowsHash @0 :UInt64;
  driverVersion @1 :Int32;        # cuDriverGetVersion
  softwareDriver @2 :Bool;
  space @3 :UInt32;               # index of its address space (schema/hello.h)
  devices @4 :List(RecordDevice);
  lastFrame @5 :UInt64;           # numbers go on behind these
  lastAside @6 :UInt64;
  completed @7 :UInt64;
  effects @8 :UInt64;
  named @9 :List(UInt32);         # handles that the worker has named, by kind
  entries @10 :List(RecordEntry); # in the order in which they were served
  pieces @11 :List(RecordPiece);  # of device memory, as the copier knows them, in its order
  copierSequence @12 :UInt32;     # of the last message to the copier
  peers @13 :List(UInt32);        # by device: bit p: device p may access its extents
  host @14 :List(RecordHost);     # pinned memory, by ascending address; descriptors or contents follow in this order
  mirrors @15 :List(RecordMirror);
  variables @16 :List(RecordVariable); # of modules; their bytes follow, in this order, then those of arrays
  arrays @17 :List(RecordArray);
  events @18 :List(RecordEvent);
  images @20 :List(RecordImage);  # offered, and not loaded yet
  cutBootTimeNs @19 :UInt64;      # CLOCK_BOOTTIME when events were looked at; everything stood still
  stagingBytes @21 :UInt64;       # of its staging memory
  digests @22 :List(RecordDigest); # tests: of the contents, as the worker that the session leaves sees them
  wordsBytes @23 :UInt64;         # of its words
  contextAhead @24 :UInt32;       # 1 + the device, by index, whose context was there before the first call; 0: none was
  format @25 :UInt32;             # stateFormat
  left @26 :List(UInt32);         # by device: the driver's ordinal of the one on which its pieces are still, and their
                                  # descriptors follow those of `host`, in this order. Empty: the copier has them
  ahead @27 :Bool;                # the session runs still, and another record follows. Of this one count what it is made
                                  # for (rowsHash to devices, contextAhead, format) and `entries`
  went @28 :UInt32;               # so many entries went ahead, which stand before these
  parallel @29 :UInt32;           # of a stream, once: so many connections can the sender use beside it
                                  # (server/worker/parallel_sockets.h)
}
struct RecordDigest {
  name @0 :Text;                  # of what, for people
  digest @1 :Data;
}
struct RecordDevice { name @0 :Text; }
struct RecordEntry {
  frame @0 :Data;                 # schema::Frame
  arguments @1 :Data;
  outputs @2 :Data;
  names @3 :List(UInt64);
}
struct RecordPiece {
  device @0 :UInt32;
  bytes @1 :UInt64;
  name @2 :UInt64;                # of cuMemCreate's memory; 0: it has none
  mappings @3 :List(RecordMapping);
}
struct RecordMapping {
  address @0 :UInt64;
  ofClient @1 :Bool;              # of sessionPhysicalMap
  access @2 :List(RecordAccess);
}
struct RecordAccess { device @0 :UInt32; flags @1 :UInt32; }
struct RecordHost {
  address @0 :UInt64;
  bytes @1 :UInt64;
  context @2 :UInt64;             # that it is registered in; 0: in any
}
struct RecordMirror { address @0 :UInt64; base @1 :Data; }
struct RecordVariable {
  owner @0 :UInt64;               # module or library
  context @1 :UInt64;
  name @2 :Text;
  address @3 :UInt64;
  bytes @4 :UInt64;
}
struct RecordImage {
  name @0 :Data;                  # schema::ImageName
  loads @1 :UInt32;               # that were announced
  here @2 :Bool;
}
struct RecordArray {
  array @0 :UInt64;               # or mipmapped array
  context @1 :UInt64;
  levels @2 :UInt32;              # of a mipmapped array; 0: it is none
  bytes @3 :UInt64;
}
struct RecordEvent {
  event @0 :UInt64;
  context @1 :UInt64;
  agoMs @2 :Float64;              # from its record to cutBootTimeNs
}
