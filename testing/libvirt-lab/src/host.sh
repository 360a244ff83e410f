# Turns new mount and UTS namespaces into a host for libvirt, and keeps them until standard input
# ends, which it does when the test drops the host or ends in any way. Then kills every process in
# the namespaces.
# Arguments: the host's name, the trees of libvirt and QEMU, the directory of the host's files, the
# directory of QEMU's capabilities, which hosts of the same version share because it takes libvirt
# many seconds to find them, and the user that libvirt runs QEMU as.
set -eu
name=$1 libvirt=$2 qemu=$3 directory=$4 capabilities=$5 user=$6

# An interrupt of the terminal reaches all processes of the test.
trap '' INT TERM HUP

changeable() {
    mkdir "$directory/$1" "$directory/$1.work"
    mount -t overlay overlay /"$1" \
        -o "lowerdir=$2,upperdir=$directory/$1,workdir=$directory/$1.work"
}
mount -t overlay overlay -o "lowerdir=$libvirt/usr:$qemu/usr:/usr" /usr
changeable etc "$libvirt/etc:/etc"
changeable var /var
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/libvirt /var/log/libvirt/qemu /var/lib/libvirt/images
mkdir -p /var/cache/libvirt/qemu/capabilities
mount --bind "$capabilities" /var/cache/libvirt/qemu/capabilities
echo "$name" >/proc/sys/kernel/hostname

# libvirt refuses to start without the user and group that Debian's package creates.
echo "libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin" >>/etc/passwd
echo "libvirt-qemu:x:64055:" >>/etc/group
cat >/etc/libvirt/libvirtd.conf <<END
host_uuid = "$(cat /proc/sys/kernel/random/uuid)"
auth_unix_ro = "none"
auth_unix_rw = "none"
unix_sock_group = "root"
log_outputs = "3:file:/var/log/libvirt/libvirtd.log"
END
cat >/etc/libvirt/qemu.conf <<END
cgroup_controllers = []
group = "$user"
namespaces = []
security_driver = "none"
stdio_handler = "file"
user = "$user"
END
if [ "$user" != root ] && [ -e /dev/kvm ]; then
    # Without KVM for this user, libvirt looks for QEMU's capabilities again before each guest.
    mknod -m 600 /run/kvm c 10 232
    chown "$user:$user" /run/kvm
    mount --bind /run/kvm /dev/kvm
fi
# The guests' serial consoles are written there.
chown "$user:$user" /var/log/libvirt/qemu
echo ready

while read -r _; do :; done

# Sets `members` to the other processes in these namespaces. Starts no process, which it would find.
find_members() {
    members=""
    for process in /proc/[0-9]*; do
        [ "$process" = "/proc/$$" ] && continue
        if [ "$process/ns/mnt" -ef "/proc/$$/ns/mnt" ] ||
            [ "$process/ns/uts" -ef "/proc/$$/ns/uts" ]; then
            members="$members ${process#/proc/}"
        fi
    done
}
tries=0
find_members
while [ -n "$members" ]; do
    # Some may have ended meanwhile. Those that are left may have started others.
    # shellcheck disable=SC2086
    kill -9 $members 2>/dev/null || :
    tries=$((tries + 1))
    [ $tries -lt 600 ] || { echo "processes that can't be killed:$members" >&2; exit 1; }
    sleep 0.05
    find_members
done
