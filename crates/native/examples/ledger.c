/* Moves an amount between two accounts of a file on a mount. Both accounts change or none,
 * even if the program, a brick or the mount fails. Build and run:
 *
 *     cargo build --release -p pagemesh-native
 *     cc -Icrates/native/include crates/native/examples/ledger.c \
 *        -Ltarget/release -lpagemesh -o ledger
 *     LD_LIBRARY_PATH=target/release ./ledger /mnt/home/ledger 40
 */
#include <pagemesh.h>

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Each account has a page of its own, apart from the other. */
enum { ACCOUNTS = 2, APART = 10 };

typedef union {
    int64_t amount;
    unsigned char bytes[PM_PAGE_BYTES];
} account;

static uint64_t place(int number) { return (uint64_t)number * APART * PM_PAGE_BYTES; }

static void must(int64_t result, const char *what) {
    if (result < 0) {
        fprintf(stderr, "%s: %s\n", what, pm_message());
        exit(1);
    }
}

/* Reads an account without copying its page. */
static int64_t amount_of(const pm_file *file, int number) {
    for (;;) {
        pm_guard *guard;
        const pm_slice *slices;
        int64_t amount = 0;
        must(pm_guard_begin(file, place(number), sizeof amount, &guard), "guard");
        if (pm_guard_slices(guard, &slices) > 0 && slices[0].len == sizeof amount)
            memcpy(&amount, slices[0].data, sizeof amount);
        /* The amount is valid only now; if the account changed meanwhile, read again. */
        if (pm_guard_end(guard) == 0)
            return amount;
    }
}

int main(int argc, char **argv) {
    static account accounts[ACCOUNTS];
    pm_file *file;
    if (argc != 3 || pm_abi_version() != PM_ABI_VERSION) {
        fprintf(stderr, "usage: ledger FILE AMOUNT\n");
        return 2;
    }
    must(pm_open(argv[1], O_RDWR | O_CREAT, 0600, &file), "open");
    must(pm_size(file), "size");
    if (pm_size(file) == 0) {
        accounts[0].amount = 1000;
        for (int at = 0; at <= APART; at++)
            must(pm_write(file, at == 0 ? &accounts[0] : &accounts[1], PM_PAGE_BYTES,
                          (uint64_t)at * PM_PAGE_BYTES), "write");
        must(pm_persist(file), "persist");
    }
    for (int at = 0; at < ACCOUNTS; at++)
        must(pm_read(file, &accounts[at], sizeof accounts[at], place(at)), "read");
    accounts[0].amount -= atoll(argv[2]);
    accounts[1].amount += atoll(argv[2]);
    pm_part parts[ACCOUNTS];
    for (int at = 0; at < ACCOUNTS; at++)
        parts[at] = (pm_part){place(at), &accounts[at], sizeof accounts[at]};
    must(pm_write_atomic(file, parts, ACCOUNTS), "move");
    printf("%" PRId64 " and %" PRId64 "\n", amount_of(file, 0), amount_of(file, 1));
    pm_close(file);
    return 0;
}
