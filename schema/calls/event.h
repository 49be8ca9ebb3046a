// Events (Event Management).
// Rows: see schema/rows.h. No include guard: included once per meaning of CALL.
// clang-format off
CALL(cuEventCreate, Custom, Mints<"phEvent">, In<"Flags">)
CALL(cuEventRecord, Custom, Handle<"hEvent">, Handle<"hStream">)
CALL(cuEventRecordWithFlags, Custom, Handle<"hEvent">, Handle<"hStream">, In<"flags">)
CALL(cuEventQuery, Custom, Handle<"hEvent">)
CALL(cuEventSynchronize, Custom, Handle<"hEvent">)
CALL(cuEventDestroy, Custom, Frees<"hEvent">)
CALL(cuEventDestroy_v2, Custom, Frees<"hEvent">)
CALL(cuEventElapsedTime, Custom, Out<"pMilliseconds">, Handle<"hStart">, Handle<"hEnd">)
CALL(cuEventElapsedTime_v2, Custom, Out<"pMilliseconds">, Handle<"hStart">, Handle<"hEnd">)
// clang-format on
