// Interrupts: they end a wait before its time, as a signal's handler does in Python. Included by tokenway.h, which has
// the conventions.
#ifndef TOKENWAY_INTERRUPT_H_
#define TOKENWAY_INTERRUPT_H_

// Sets the function that waiting threads ask whether to go on. Threads that wait inside the library call `asked` about
// every 50 ms, the first time after having waited that long. While it returns 0 the wait goes on. Else the call ends
// with twInterrupted, and the sentence says what it waited for. Such a call gives its group up, as twGroupAbort does,
// so that peers hear at once: they return twPeerAborted, also in twGroupCreate and twGroupShrink, and twPeerAborted or
// twPeerDied while comms are created. twGroupDestroy ends its group all the same.
//
// `asked` may take its time and may call the library, but not the group whose call waits (twInvalidUsage); calls that
// it makes are not interrupted. thread: the only thread whose waits are interrupted, as gettid() names it (in a forked
// child it has another name); 0: every thread. The process has one `asked`: a new one replaces the one before. NULL:
// nobody is asked any more; but a thread may still be in the one before.
TW_API twResult_t twSetInterrupt(int (*asked)(void* context), void* context, int64_t thread);

#endif  // TOKENWAY_INTERRUPT_H_
