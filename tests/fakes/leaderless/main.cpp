/// A process whose first thread has ended while another goes on: the kernel then shows nothing of
/// its memory under the process' own number. So looks a worker that was sent SIGKILL while another
/// of its threads hangs in a driver.
///
/// The other thread waits for the end of standard input.

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

int main() {
    std::thread{[] {
        char byte = 0;
        while (::read(STDIN_FILENO, &byte, 1) > 0) {
        }
        std::_Exit(0);
    }}.detach();
    ::syscall(SYS_exit, 0);  // of this thread alone
}
