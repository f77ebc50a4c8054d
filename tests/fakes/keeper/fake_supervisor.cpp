/// fake_supervisor --socket PATH FLEET: lends its place to a test. FLEET is a socket of the test,
/// which gets the link and the listening socket and speaks for this process; one packet back says
/// with which status to end. A FLEET that is missing is an invalid configuration, as it is for the
/// real one.

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

int main(int argc, char** argv) {
    if (argc != 4 || std::strcmp(argv[1], "--socket") != 0) return 2;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, argv[3], sizeof address.sun_path - 1);
    const int test = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (::connect(test, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) return 78;

    const int lent[] = {3, 4};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof lent)] = {};
    char word = 'x';
    iovec part{&word, 1};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof lent);
    std::memcpy(CMSG_DATA(rights), lent, sizeof lent);
    if (::sendmsg(test, &message, MSG_NOSIGNAL) != 1) return 1;

    char status[16] = {};
    // The test has gone: wait to be killed.
    if (::recv(test, status, sizeof status - 1, 0) <= 0) ::pause();
    return std::atoi(status);
}
