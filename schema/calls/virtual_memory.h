// Virtual memory (Virtual Memory Management).
// Rows: see schema/rows.h. No include guard: included once per meaning of CALL.
// clang-format off
CALL(cuMemAddressReserve, Custom, Out<"ptr">, In<"size">, In<"alignment">, In<"addr">, In<"flags">)
CALL(cuMemAddressFree, Custom, In<"ptr">, In<"size">)
CALL(cuMemCreate, Custom, Out<"handle">, In<"size">, Struct<"prop">, In<"flags">)
CALL(cuMemRelease, Custom, In<"handle">)
CALL(cuMemMap, Custom, In<"ptr">, In<"size">, In<"offset">, In<"handle">, In<"flags">)
CALL(cuMemUnmap, Custom, In<"ptr">, In<"size">)
CALL(cuMemSetAccess, Custom, In<"ptr">, In<"size">, Struct<"desc">, In<"count">)
CALL(cuMemGetAccess, Custom, Out<"flags">, Struct<"location">, In<"ptr">)
CALL(cuMemGetAllocationGranularity, Custom, Out<"granularity">, Struct<"prop">, In<"option">)
CALL(cuMemGetAllocationPropertiesFromHandle, Custom, Out<"prop">, In<"handle">)
CALL(cuMemRetainAllocationHandle, Custom, Out<"handle">, Unused<"addr">)
CALL(cuMemExportToShareableHandle, Local, Unused<"shareableHandle">, In<"handle">, In<"handleType">, In<"flags">)
CALL(cuMemImportFromShareableHandle, Local, Unused<"handle">, Unused<"osHandle">, In<"shHandleType">)
// clang-format on
