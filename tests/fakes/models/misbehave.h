#pragma once

#include <string_view>

/// Model code that goes wrong as it is told, for the hand-made AOTInductor library and for the
/// minimal worker:
///
///   ok              nothing
///   abort exit segv stack_overflow   the process ends so; `segv` writes to an address that is
///                                    not there
///   loop, spin      computes for ever; `deadlock` waits for a lock that it holds
///   ignore_sigterm  SIGTERM is ignored from now on, a thread takes no signal and never ends, and
///                   neither does the call
///   setsid_child    leaves a grandchild, in a session of its own and with every descriptor, that
///                   sleeps for ever
///   leak            takes memory until it is ended
///   throw           fails, with a word on std::cerr
///   print100mb      prints that much
///   print1gib       writes that much to standard error, in lines with colours, zeros and bells
///
/// Returns  whether it goes on; after `throw` it does not
bool misbehave(std::string_view what);
